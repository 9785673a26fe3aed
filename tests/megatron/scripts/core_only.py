"""Train a tiny GPT with megatron-core alone, as of a wheel without ``megatron.training``.

    python core_only.py FOLDER '{"settings": {...}, "ranks": 2, "tensor": 1, "sgd": false, "dropout": 0.0}' …

Builds the model, Megatron's optimizer and its schedule by hand, with Megatron's DDP where ``settings`` is null, else
with this package's class. Everything is imported once; the ranks of one run after the other are forked. They leave
``run<m>-rank<n>.pt`` in FOLDER: losses, gradient norms, gradients of step 1, parameters.
"""

import importlib
import json
import os
import signal
import sys
import traceback
import types
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor

PRELOADED = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "mindspeed_fsdp2.megatron.data_parallel",
    "mindspeed_fsdp2.megatron.patches",
)
STEPS, BATCH, LENGTH, VOCABULARY = 6, 8, 32, 128
ARGS = Namespace(
    fsdp2_config_path="",
    distributed_backend="gloo",
    mindspeed_fsdp2_checked=True,
    use_torch_fsdp2=True,
    bf16=False,
    loss_scale=None,
    data_parallel_random_init=False,
    check_for_nan_in_loss_and_grad=True,
    ckpt_format="torch_dcp",
    save=None,
    load=None,
)


def stand_in_for_training() -> None:
    """Put what this package asks ``megatron.training`` for where it looks; everything else there is absent."""
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: ARGS
    training.print_rank_0 = lambda text: None
    training.async_utils = types.ModuleType("megatron.training.async_utils")
    training.async_utils.maybe_finalize_async_save = lambda *_, **__: None
    sys.modules.update({training.__name__: training, training.async_utils.__name__: training.async_utils})


def patch_core() -> None:
    """Apply the rows of PATCHES about optimizer steps: those of the other half of Megatron have no targets here."""
    from mindspeed_fsdp2.megatron.patcher import install
    from mindspeed_fsdp2.megatron.patches import PATCHES

    install([row for row in PATCHES if row.name in ("norm-mesh", "grad-norm", "zero-count", "clip")])


def build(job):
    """Return Megatron's config and the wrapped model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=job["dropout"],
        hidden_dropout=job["dropout"],
        tensor_model_parallel_size=job["tensor"],
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    options = DistributedDataParallelConfig(use_distributed_optimizer=False)
    if job["settings"] is None:
        return config, DistributedDataParallel(config, options, model)
    from mindspeed_fsdp2.megatron.data_parallel import FSDP2DataParallel

    return config, FSDP2DataParallel(config, options, model)


def batches(data_rank, data_ranks):
    """Yield this rank's tokens of every micro-batch: the same sequence whatever the number of ranks."""
    generator = torch.Generator().manual_seed(1234)
    while True:
        whole = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        yield whole.chunk(data_ranks)[data_rank]


def loss_of(losses):
    loss = losses.float().mean()
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    return loss, {"lm loss": logged / dist.get_world_size()}


def forward_step(data, model):
    tokens = next(data)
    places = torch.arange(LENGTH).expand(len(tokens), -1)
    above = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], places, above, labels=tokens[:, 1:]), partial(loss_of)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def named(model):
    return [(name.replace("module.", ""), param) for name, param in model.named_parameters()]


def train(job, rank, name):
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", init_method=f"file://{name}-store", rank=rank, world_size=job["ranks"])
    parallel_state.initialize_model_parallel(job["tensor"])
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    config, model = build(job)
    data_rank = parallel_state.get_data_parallel_rank()
    data_ranks = parallel_state.get_data_parallel_world_size()
    sgd = OptimizerConfig(optimizer="sgd", lr=0.3, clip_grad=0.0)
    adam = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0)
    optimizer = get_megatron_optimizer(sgd if job["sgd"] else adam, [model])
    step = get_forward_backward_func()
    data = batches(data_rank, data_ranks)
    found = {"losses": [], "norms": [], "kinds": {name: type(param).__name__ for name, param in named(model)}}
    for number in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = step(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH // data_ranks,
            forward_only=False,
        )
        if number == 0:
            grads = {name: getattr(param, "main_grad", None) for name, param in named(model)}
            grads = {name: param.grad if grads[name] is None else grads[name] for name, param in named(model)}
            found["grads"] = {name: whole(grad) for name, grad in grads.items()}
        _, norm, _ = optimizer.step()
        found["losses"].append(sum(float(loss["lm loss"]) for loss in losses) / len(losses))
        found["norms"].append(float(norm or 0.0))
    found["params"] = {name: whole(param) for name, param in named(model)}
    torch.save(found, f"{name}-rank{rank}.pt")
    dist.barrier()


def forked(job, rank, name):
    """Fork one rank, and return its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        ARGS.fsdp2_config_path = f"{name}.yaml"
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
        from mindspeed_fsdp2.megatron.cpu import enable_cpu

        enable_cpu()
        if job["settings"] is not None:
            patch_core()
        train(job, rank, name)
        code = 0
    except BaseException:  # noqa: BLE001 - the end of the forked process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main():
    folder, jobs = Path(sys.argv[1]), [json.loads(text) for text in sys.argv[2:]]
    torch.set_num_threads(1)
    stand_in_for_training()
    for module in PRELOADED:
        importlib.import_module(module)
    for number, job in enumerate(jobs):
        name = folder / f"run{number}"
        Path(f"{name}.yaml").write_text(yaml.safe_dump(job["settings"]))
        pids = {forked(job, rank, name) for rank in range(job["ranks"])}
        while pids:
            pid, status = os.wait()
            pids.discard(pid)
            if status:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
                sys.exit(f"run {number}: a rank ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
