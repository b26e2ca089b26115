"""INTERIM, to be replaced."""
import sysconfig, pathlib, numpy as np, torch
from stabletrain.records import Batch
class Stdlib:
    vocab_size=256; per="byte"; prompt="\ndef "; summary="stdlib interim"
    def __init__(self, block_size, seed):
        p=pathlib.Path(sysconfig.get_paths()["stdlib"])
        fs=[f for f in sorted(p.rglob("*.py")) if not {"site-packages","test","tests","__pycache__","idle_test"}&set(f.relative_to(p).parts)]
        b=b"".join(f.read_bytes() for f in fs); self.data=np.frombuffer(b,np.uint8); self.block_size=block_size; self.seed=seed
        self.n=int(len(self.data)*.98)
    def batch(self, step,size,split):
        rng=np.random.default_rng([self.seed,step,split=="val"])
        if split=="val": o=self.n+(np.arange(size)+step*size)*self.block_size
        else: o=rng.integers(0,self.n-self.block_size-1,size)
        w=np.stack([self.data[i:i+self.block_size+1] for i in o]).astype(np.int64)
        return Batch(torch.from_numpy(w[:,:-1]),torch.from_numpy(w[:,1:]))
    def batches(self,size,split): return (len(self.data)-self.n-1)//self.block_size//size
    def encode(self,t): return list(t.encode())
    def decode(self,i): return bytes(i).decode(errors="replace")
