#!/usr/bin/env bash
# What happens in a job between Slurm and train.py: start the ranks, pass on the signal that the time is up, queue again.
#
#   source job.sh FOLDER PROCESSES MAX_REQUEUES NOTICE PYTHON train.py OVERRIDES...
#
# FOLDER is the run's, the same at every start; PROCESSES are those of a node; NOTICE is how many seconds before its end
# the job is told (USR2, to this shell alone). Ranks that are told to stop finish the step, save and end with code 75.

folder=$1 processes=$2 max_requeues=$3 notice=$4
shift 4
restarts=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID   # of an array's last task this number is the whole array's
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
  say "$1; queued again ($((restarts + 1)) of at most $max_requeues times)"
  scontrol requeue "$job" || exit 75
  sleep 300   # Slurm ends this script
  exit 75
}

newest_checkpoint() {
  find "$folder/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1
}

set +e
stop='' ended=''
trap 'stop=1' USR2
trap 'ended=1' TERM

say "start $((restarts + 1)) on $SLURM_JOB_NODELIST"
if ((restarts > max_requeues)); then
  say "not continued, --max-requeues is $max_requeues"
  exit 75
fi
before=$(newest_checkpoint)

python=$1
shift
ranks=("$python")
if ((SLURM_JOB_NUM_NODES * processes > 1)); then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  ranks+=("$(dirname -- "${BASH_SOURCE[0]}")/ranks.py" --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes"
    --rdzv-backend=c10d --rdzv-endpoint="${address:-$first}:$((15000 + SLURM_JOB_ID % 15000))"
    --rdzv-id="$SLURM_JOB_ID.$restarts")
fi
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# A rank takes up USR2 once it trains; until then it, and torchrun and W&B's process for good, must not die of it.
# srun gives the highest of the nodes' codes and ends the other nodes (TERM) when one fails: an end by TERM has to be the
# lowest, so it is 1 up to here, and an error is 99.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c 'trap "" USR2; trap : TERM; "$@"
  case $? in 1) exit 99 ;; 143) exit 1 ;; *) exit $? ;; esac' rank \
  "${ranks[@]}" "$@" hydra.run.dir="'$folder'" resume=auto &
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
    scancel --quiet --signal=USR2 "$job"   # again and again: a rank may not have begun to listen
  fi
  sleep 1
done
wait "$child"
code=$?
case $code in 1) code=143 ;; 99) code=1 ;; esac

if [[ -n $ended ]]; then
  say "ended by Slurm, code $code"
elif ((code == 75)); then
  requeue "saved"
elif ((code == 143)); then
  requeue "ended by SIGTERM before it trained"
elif ((code > 128)) && [[ $(newest_checkpoint) != "$before" ]]; then
  requeue "killed (code $code) after $(basename "$(newest_checkpoint)") was saved"
else
  say "code $code"
fi
exit "$code"
