"""The decoder in shards under FSDP2, with the initial weights of the whole one.

Each rank draws or reads the weights tensor by tensor and keeps its rows, so none ever has the whole
model.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from farflock.node.model.device import Device
from farflock.node.model.llama import Llama, ModelConfig, initialize, rotary
from farflock.node.model.replica_fsdp import rows_of
from farflock.node.model.weights_folder import WeightsFolder


def build_sharded(
    config: ModelConfig, seed: int, device: Device, weights: WeightsFolder | None = None
) -> Llama:
    """Return this rank's shard of `initial(config, seed, weights)`, over the default process group.

    Layers are gathered one at a time, in bf16 if that is the device's precision. Master weights,
    gradients and their sums stay float32."""
    with torch.device("meta"):
        model = Llama(config)
    in_bf16 = torch.bfloat16 if device.precision == "bf16" else None
    policy = MixedPrecisionPolicy(in_bf16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device.place.type, (dist.get_world_size(),))
    for module in (*model.blocks(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device.place)
    for name, angles in zip(("cos", "sin"), rotary(config), strict=True):
        model.get_buffer(name).copy_(angles)
    for name, weight in model.named_parameters():
        assert isinstance(weight, DTensor), f"{name} is not sharded"
        whole = torch.empty(weight.shape, dtype=torch.float32)
        if weights is None:
            initialize(whole, name, config, seed)
        else:
            weights.fill(name, whole)
        rows = rows_of(len(whole), mesh.get_rank(), mesh.size())
        with torch.no_grad():
            weight.to_local().copy_(whole[rows.start : rows.stop])
    return model
