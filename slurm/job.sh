#!/usr/bin/env bash
# Runs inside a Slurm job: starts the ranks, forwards the signal sent before the time limit, and requeues the job.
#
#   source job.sh FOLDER PROCESSES MAX_REQUEUES NOTICE SRUN_OPTIONS... -- PYTHON PROGRAM ARGUMENTS...
#
# FOLDER is the run folder, the same at every start. PROCESSES is the number per node. NOTICE is how many seconds before
# the time limit Slurm sends USR2 to this shell (and to nothing else). Ranks that are asked to stop finish the step, save
# a checkpoint and exit with code 75. If the program may remove FOLDER, set notes_folder to one that it leaves alone.
# If the program trains several runs (pack.py), set packed_folders to their run folders, of which FOLDER is the first.

folder=$1 processes=$2 max_requeues=$3 notice=$4
shift 4
folders=("${packed_folders[@]:-$folder}")
srun_options=()
while [[ $1 != -- ]]; do
  srun_options+=("$1")
  shift
done
shift
restarts=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID   # the last task of an array has the array's own number here
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

say() {
  printf 'slurm    %s job %s: %s\n' "$(date +%Y-%m-%dT%H:%M:%S)" "$job" "$1"
}

requeue() {
  if ((restarts >= max_requeues)); then
    say "$1; not queued again, this was start $((restarts + 1)) and --max-requeues is $max_requeues"
    exit 75
  fi
  local why=$1
  if [[ -n $twice ]]; then
    why+="; $twice: the job avoids $avoid from now on (scontrol update JobId=$job ExcNodeList= allows them again)"
  fi
  say "$why; queued again ($((restarts + 1)) of at most $max_requeues times)"
  scontrol requeue "$job" || exit 75
  if [[ -n $avoid ]]; then   # Slurm changes this of waiting jobs only, and this one waits for the end of this script
    for _ in {1..10}; do
      scontrol update JobId="$job" ExcNodeList="$avoid" && break
      sleep 1
    done
  fi
  sleep 300   # until Slurm ends this script
  exit 75
}

newest_checkpoint() {   # of a run, or of an arm that is tried to heal it
  local each
  for each in "${folders[@]}"; do
    find "$each/checkpoints" "$each"/whatif/*/*/checkpoints -maxdepth 1 -name 'step-*' -printf '%T@ %p\n' 2>/dev/null
  done | sort -n | tail -n 1 | cut -d ' ' -f 2-
}

progress() {   # changes with every checkpoint and every logged step, also with those of the arms
  local each
  newest_checkpoint
  for each in "${folders[@]}"; do
    tail -q -n 1 "$each/metrics.jsonl" "$each"/whatif/*/*/metrics.jsonl 2>/dev/null
  done
}

node_addresses() {   # Slurm's address of each node, in the order of SLURM_NODEID; a node may have others as well
  local name address
  local -A addresses
  while read -r name address; do
    addresses[$name]=$address
  done < <(scontrol show node --oneliner "$SLURM_JOB_NODELIST" |
    sed -n 's/^NodeName=\([^ ]*\) .* NodeAddr=\([^ ]*\) .*/\1 \2/p')
  for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    echo "${addresses[$name]:-$name}"
  done
}

nodes_to_avoid() {   # those that the job avoids already, and those named here
  local already
  already=$(scontrol show job --oneliner "$job" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
  { [[ ${already:-(null)} == "(null)" ]] || echo "$already"; printf '%s\n' "$@"; } | paste -s -d ,
}

lost_nodes() {   # of those on which the start before this one ran: nodes that are down now, or were started since then
  local of since before_this name state boot
  read -r of since before_this <"$running" || return
  [[ $of == "$job" ]] || return
  while read -r name boot state; do
    if [[ $state =~ DOWN|FAIL|NOT_RESPONDING|\* || ($boot == 2* && $boot > $since) ]]; then
      echo "$name"
    fi
  done < <(scontrol show node --oneliner "$before_this" | sed -n \
    's/^NodeName=\([^ ]*\) .* State=\([^ ]*\) .* BootTime=\([^ ]*\) .*/\1 \3 \2/p')
}

note_failure() {   # NODE WHY: of a node that has failed this job twice, the job is kept away when it is queued again
  echo "$job $1 $2" >>"$failed"
  say "node $1 failed: $2"
  if (($(grep -c "^$job $1 " "$failed") == 2)); then
    twice="$1 has failed this job twice"
    avoid=$(nodes_to_avoid "$1")
  fi
}

set +e
stop='' ended='' avoid='' twice=''
trap 'stop=1' USR2
trap 'ended=1' TERM

say "start $((restarts + 1)) on $SLURM_JOB_NODELIST"
if ((restarts > max_requeues)); then
  say "not continued, --max-requeues is $max_requeues"
  exit 75
fi
before=$(newest_checkpoint) begun=$(progress)
# How many starts in a row took no step; a file, since it must outlive a start.
without_step=${notes_folder:-$folder}/slurm.without_step
unsuited=${notes_folder:-$folder}/slurm.unsuited   # names of the nodes whose card this start cannot use
export STABLETRAIN_UNSUITED_NODES=$unsuited
killed=${notes_folder:-$folder}/slurm.killed   # nodes of this start on which a rank was killed or crashed, with its code
failed=${notes_folder:-$folder}/slurm.failed_nodes   # job, node and reason, one line for each failure
running=${notes_folder:-$folder}/slurm.running   # job, time and nodes of a start that has not ended by itself
export STABLETRAIN_KILLED_ON=$killed
rm -f "$unsuited" "$killed"
if [[ -f $running ]]; then
  for node in $(lost_nodes); do
    note_failure "$node" "it was lost during an earlier start"
  done
fi
mkdir -p "$(dirname -- "$running")"
echo "$job $(date +%Y-%m-%dT%H:%M:%S) $SLURM_JOB_NODELIST" >"$running"
if [[ -n $twice ]] && scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -qxF "${twice%% *}"; then
  requeue "not started"
fi
if ((restarts == 0)); then
  rm -f "$without_step"
fi

python=$1
shift
ranks=("$python")
traces=''
if ((SLURM_JOB_NUM_NODES * processes > 1)); then
  mapfile -t addresses < <(node_addresses)
  ranks+=("$(dirname -- "${BASH_SOURCE[0]}")/ranks.py" --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes"
    --rdzv-backend=c10d --rdzv-endpoint="${addresses[0]}:$((15000 + SLURM_JOB_ID % 15000))"
    --rdzv-id="$SLURM_JOB_ID.$restarts")
  # By itself torchrun kills the ranks 30 s after SIGTERM, which may cut off a large checkpoint (pytorch/pytorch#172596).
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-$((notice > 50 ? notice - 20 : 30))}
  STABLETRAIN_NODE_ADDRESSES=$(IFS=,; echo "${addresses[*]}")   # for ranks.py
  export STABLETRAIN_NODE_ADDRESSES
  # If NCCL times out, PyTorch writes the last collectives of each rank to files that begin with this.
  if [[ -z ${TORCH_FR_DUMP_TEMP_FILE:-}${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-} ]]; then
    traces=$(realpath -m -- "$folder")/collectives
    mkdir -p "$traces"
    export TORCH_FR_DUMP_TEMP_FILE=$traces/start-$((restarts + 1))-rank-
  fi
fi
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then   # else torchrun sets one thread for each rank
  threads=$((SLURM_CPUS_PER_TASK / (processes * ${#folders[@]})))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
fi
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# A rank handles USR2 only once it trains; until then USR2 must not kill it, and it must never kill torchrun or W&B's
# process: hence the trap. srun returns the highest exit code of all nodes, and when one node fails it ends the others
# with TERM. An end by TERM must not hide the code of the node that failed, so it is the lowest code, 1, inside srun, and
# an error is 99; both are translated back below. A node whose card cannot do what the run needs (4) writes its name
# down, as does one whose rank was killed (137) or crashed (132, 135, 136, 139). An abort (134) is none of these: NCCL
# aborts the ranks that have waited in vain. Hundreds of ranks need more open files than Slurm's soft limit allows.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${srun_options[@]}" bash -c 'ulimit -Sn "$(ulimit -Hn)"
  trap "" USR2; trap : TERM; "$@"; code=$?
  if ((code == 4)); then echo "${SLURMD_NODENAME:-$(hostname -s)}" >>"$STABLETRAIN_UNSUITED_NODES"; fi
  if [[ $code =~ ^13[25679]$ ]]; then echo "${SLURMD_NODENAME:-$(hostname -s)} $code" >>"$STABLETRAIN_KILLED_ON"; fi
  case $code in 1) exit 99 ;; 143) exit 1 ;; *) exit $code ;; esac' rank \
  "${ranks[@]}" "$@" &
child=$!

told=0
while kill -0 "$child" 2>/dev/null; do
  if [[ -n $stop ]]; then
    if ((told == 0)); then
      told=$SECONDS
      say "told to stop"
    elif ((SECONDS - told > notice - 20)); then
      requeue "the ranks did not stop within $((SECONDS - told)) s; the last checkpoint holds"
    fi
    scancel --quiet --signal=USR2 "$job"   # sent repeatedly: a rank may not have installed its handler yet
  fi
  sleep 1
done
wait "$child"
code=$?
case $code in 1) code=143 ;; 99) code=1 ;; esac
if [[ -n $traces ]]; then
  rmdir "$traces" 2>/dev/null   # unless there are any
fi
trained=''
if [[ $(progress) != "$begun" ]]; then
  trained=1
  rm -f "$without_step"
fi

if [[ -z $ended ]] && ((code != 143)); then   # else a node may be lost, which the next start finds out
  rm -f "$running"
fi
# If ranks were killed on several nodes, the cause is not one of them.
if [[ -z $ended$stop && -f $killed && $(wc -l <"$killed") == 1 ]]; then
  read -r node signaled <"$killed"
  note_failure "$node" "a rank was killed or crashed there (code $signaled)"
fi
rm -f "$killed"

if [[ -n $ended ]]; then
  say "ended by Slurm, code $code"
elif ((code == 75)); then
  requeue "saved"
elif ((code == 143)) && [[ -n $trained ]]; then
  requeue "ended by SIGTERM, or by the loss of another node"
elif ((code == 143)) || [[ $code == 4 && -s $unsuited ]]; then
  why="ended by SIGTERM, or by the loss of another node, before it trained"
  starts=$(($(cat "$without_step" 2>/dev/null) + 1))
  echo "$starts" >"$without_step"
  if ((code == 4)); then
    why="the card of $(sort -u "$unsuited" | paste -s -d ,) cannot do what the run needs, as the message above says"
    mapfile -t names < <(sort -u "$unsuited")
    avoid=$(nodes_to_avoid "${names[@]}" ${twice:+"${twice%% *}"}) twice=''
    why+="; it avoids $avoid from now on (scontrol update JobId=$job ExcNodeList= allows them again)"
    rm -f "$unsuited"
  fi
  if ((starts <= 3)); then
    requeue "$why"
  fi
  say "code $code; not queued again, $starts starts in a row ended before a step"
elif ((code > 128)) && [[ $(newest_checkpoint) != "$before" ]]; then
  requeue "killed (code $code) after $(basename "$(newest_checkpoint)") was saved"
else
  say "code $code"
fi
exit "$code"
