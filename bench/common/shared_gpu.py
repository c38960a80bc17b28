"""Weight sync between a trainer and replicas on one GPU: the testbed's engine, since NCCL refuses two ranks there.

verl imports it by `checkpoint_engine.custom_backend_module`, in every process that makes a checkpoint engine.
"""

from verl.checkpoint_engine import base

from esgrpo.platforms import cpu_checkpoint

cpu_checkpoint.register(base)
