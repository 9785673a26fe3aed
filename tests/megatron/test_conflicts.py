"""The conflict tables against Megatron's real parser: names, defaults and negative forms of every flag."""

from __future__ import annotations

import argparse
import warnings
from argparse import Action, ArgumentParser, Namespace
from typing import Any

import pytest

pytest.importorskip("megatron.training", reason="needs a megatron-core wheel >= 0.17 or a Megatron-LM checkout")

from mindspeed_fsdp2.config import load_config  # noqa: E402
from mindspeed_fsdp2.errors import ConflictError  # noqa: E402
from mindspeed_fsdp2.megatron.arguments import add_arguments  # noqa: E402
from mindspeed_fsdp2.megatron.conflicts import (  # noqa: E402
    CONFLICTS,
    NOTICES,
    Flag,
    Situation,
    check_conflicts,
    find_conflicts,
    notices,
)

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --vocab-size 256 --transformer-impl local"
)
FSDP2 = "--use-torch-fsdp2 --fsdp2-config-path cfg.yaml --no-gradient-accumulation-fusion --ckpt-format torch_dcp"
# Flags of the tables that Megatron does not have.
MINDSPEED = {
    "--adaptive-memory-optimization",
    "--adaptive-recompute-device-size",
    "--adaptive-recompute-device-swap",
    "--compress-optimizer",
    "--enable-recompute-layers-per-pp-rank",
    "--enable-zero3",
    "--gemm-gradient-accumulation-fusion",
    "--layerzero",
    "--moe-adaptive-recompute-activation",
    "--moe-zero-memory",
    "--optimizer-selection",
    "--param-and-grad-buffer-pad",
    "--quant-grads",
    "--quant-states",
    "--recompute-activation-function",
    "--recompute-activation-function-num-layers",
    "--recompute-in-advance",
    "--recompute-in-bubble",
    "--recompute-norm",
    "--recompute-norm-num-layers",
    "--reset-bucket-group-order",
    "--reuse-fp32-param",
    "--smart-swap",
    "--swap-attention",
    "--swap-layer-input",
    "--swap-optimizer",
    "--virtual-optimizer",
}
OLDER_MEGATRON = {"--use-custom-fsdp", "--keep-fp8-transpose-cache-when-using-custom-fsdp"}
# Flags that came with 0.18 or 0.19.
NEWER_MEGATRON = {
    "--fsdp-db-use-persist-buf-on-alloc-fail",
    "--megatron-fsdp-enable-fine-grained-param-gather",
    "--megatron-fsdp-max-pool-double-buffer",
    "--moe-paged-stash",
    "--no-use-layer-wise-param-layout",
    "--overlap-dispatch-backward-with-experts-wgrad",
    "--save-params-interval",
    "--tensor-parallel-num-weight-shards",
}

ROWS = (*CONFLICTS, *NOTICES)
FLAGS = {flag: None for row in ROWS for flag in (*row.flags, *row.together, *row.unless)}


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """Megatron's parser with our flags, made as Megatron makes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        return add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def parse(parser: ArgumentParser, line: str) -> Namespace:
    args = parser.parse_args(f"{MODEL} {line}".split())
    args.rank, args.world_size = 0, 4  # parse_args of Megatron takes them from the environment
    return args


def conflicts(parser: ArgumentParser, line: str, environ: dict[str, str] | None = None, **settings: Any) -> list[str]:
    return find_conflicts(parse(parser, line), load_config(settings), environ or {})


@pytest.mark.parametrize(
    "line",
    [
        FSDP2,
        f"{FSDP2} --bf16 --distributed-backend gloo",
        f"{FSDP2} --bf16 --save /ckpt --save-interval 2 --no-save-optim",
        f"{FSDP2} --save /ckpt --save-interval 2 --optimizer sgd --tensor-model-parallel-size 1",
        f"{FSDP2} --ckpt-format torch_dist --tensor-model-parallel-size 2 --context-parallel-size 2",
        f"{FSDP2} --num-experts 4 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1",
        f"{FSDP2} --distributed-backend npu:hccl,cpu:gloo --log-num-zeros-in-grad --log-params-norm",
        f"{FSDP2} --untie-embeddings-and-output-weights --calculate-per-token-loss --data-parallel-random-init",
        f"{FSDP2} --bf16 --accumulate-allreduce-grads-in-fp32 --loss-scale 128 --decoupled-lr 1e-4",
        f"{FSDP2} --use-cpu-initialization --check-for-spiky-loss --rerun-mode validate_results --manual-gc",
        f"{FSDP2} --empty-unused-memory-level 2 --exit-interval 5 --eval-iters 2 --log-throughput --profile",
    ],
)
def test_good_command_lines(parser: ArgumentParser, line: str) -> None:
    assert conflicts(parser, line, reduce_dtype="fp32") == []
    assert notices(parse(parser, line), load_config({"reduce_dtype": "fp32"})) == []


def test_megatron_accepts_the_good_command_line(parser: ArgumentParser, capfd: pytest.CaptureFixture[str]) -> None:
    from megatron.training.arguments import validate_args

    line = f"{FSDP2} --untie-embeddings-and-output-weights --distributed-backend gloo --save /ckpt --save-interval 2"
    args = parse(parser, line)
    check_conflicts(args, load_config({}), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert validate_args(args).use_torch_fsdp2 is True
    assert args.fsdp2_config_path == "cfg.yaml"


@pytest.mark.parametrize(("more", "in_fp32"), [("", True), ("--grad-reduce-in-bf16", False)])
def test_bf16_means_gradients_in_fp32_unless_typed_otherwise(
    parser: ArgumentParser, more: str, in_fp32: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    from megatron.training.arguments import validate_args

    args = parse(parser, f"{FSDP2} --untie-embeddings-and-output-weights --bf16 {more}")
    assert args.accumulate_allreduce_grads_in_fp32 is False
    assert bool(find_conflicts(args, load_config({"reduce_dtype": "bf16"}), {})) is in_fp32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert validate_args(args).accumulate_allreduce_grads_in_fp32 is in_fp32


def test_without_fsdp2_nothing_is_refused(parser: ArgumentParser) -> None:
    line = "--use-distributed-optimizer --overlap-grad-reduce --recompute-activations --fp16 --load /ckpt"
    assert conflicts(parser, line, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == []
    assert [
        text.split(":")[0] for text in conflicts(parser, f"{line} --downcast-to-bf16 --fsdp2-config-path c.yaml")
    ] == [
        "--fsdp2-config-path c.yaml",
        "--downcast-to-bf16",
    ]


def test_defaults_are_not_taken_for_typed(parser: ArgumentParser) -> None:
    assert [text.split(":")[0] for text in conflicts(parser, "--use-torch-fsdp2")] == [
        "--use-torch-fsdp2 without --fsdp2-config-path",
        "--no-gradient-accumulation-fusion is missing",
    ]
    assert notices(parse(parser, "--use-torch-fsdp2"), load_config({})) == []


def sample(action: Action, flag: Flag) -> list[str]:
    """Return what to type after a flag so that it counts."""
    if action.nargs == 0:
        return []
    if flag.only is not None:
        return [str(flag.only[0])]
    if action.choices is not None:
        return [str(next(choice for choice in action.choices if choice not in flag.off))]
    return ["7"]


def test_all_flags_are_known() -> None:
    assert MINDSPEED | OLDER_MEGATRON | NEWER_MEGATRON - {"--tensor-parallel-num-weight-shards"} <= {
        flag.text for flag in FLAGS
    }


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.text + (f"={flag.only[0]}" if flag.only else ""))
def test_flag_reads_what_megatron_parses(parser: ArgumentParser, flag: Flag) -> None:
    action = next((action for action in parser._actions if flag.text in action.option_strings), None)
    if action is None:
        assert flag.text in MINDSPEED | OLDER_MEGATRON | NEWER_MEGATRON, f"{flag.text} is no flag of this Megatron"
        return
    typed = sample(action, flag)
    situation = Situation(parse(parser, " ".join([flag.text, *typed])), None, {})
    assert flag.typed(situation) == " ".join([flag.text, *typed])
    untyped = Situation(parse(parser, ""), None, {})
    if flag.only is None or action.default not in flag.only:  # torch_dist is the default and counts
        assert flag.typed(untyped) is None


@pytest.mark.parametrize(
    ("line", "settings", "expected"),
    [
        (
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            {},
            "--use-distributed-optimizer, --overlap-param-gather: FSDP2 shards gradients and optimizer state itself, "
            "and has none of the buffers Megatron's distributed optimizer works on. Remove it; sharding_size in the "
            "YAML sets how many ranks share one copy.",
        ),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16",
            {},
            "--use-precision-aware-optimizer, --exp-avg-dtype bf16: Megatron builds it on its distributed optimizer "
            "only. Remove it.",
        ),
        (
            "--optimizer-cpu-offload",
            {},
            "--optimizer-cpu-offload: Megatron builds it on its distributed optimizer only. Remove it; offload_to_cpu: "
            "true in the YAML keeps weights, gradients and optimizer state in host memory.",
        ),
        (
            "--use-megatron-fsdp",
            {},
            "--use-megatron-fsdp: two implementations would shard the same weights. Keep either it or "
            "--use-torch-fsdp2.",
        ),
        (
            "--data-parallel-sharding-strategy optim_grads --fsdp-double-buffer",
            {},
            "--data-parallel-sharding-strategy optim_grads, --fsdp-double-buffer: it sets up Megatron-FSDP and means "
            "nothing to FSDP2. Remove it; the YAML sets up FSDP2.",
        ),
        (
            "--tensor-parallel-num-weight-shards 2",
            {},
            "--tensor-parallel-num-weight-shards 2: Megatron would cut each weight along a second axis that FSDP2 does "
            "not know. Remove it; FSDP2 shards the weights.",
        ),
        (
            "--pipeline-model-parallel-size 2",
            {},
            "--pipeline-model-parallel-size 2: Megatron does not run FSDP2 in pipeline stages. Write "
            "--pipeline-model-parallel-size 1.",
        ),
        (
            "--num-experts 4 --expert-model-parallel-size 2",
            {},
            "--expert-model-parallel-size 2: gradients of experts would need another data-parallel group than the one "
            "FSDP2 shards over. Write --expert-model-parallel-size 1; every rank then computes all experts, sharded "
            "like other weights.",
        ),
        (
            "--num-experts 4 --expert-tensor-parallel-size 2",
            {},
            "--expert-tensor-parallel-size 2: gradients of experts would need another data-parallel group than the one "
            "FSDP2 shards over. Remove it.",
        ),
        (
            "--fp16",
            {},
            "--fp16: Megatron has no fp16 training with FSDP2. Write --bf16, or param_dtype: bf16 in the YAML.",
        ),
        (
            "--optimizer muon",
            {},
            "--optimizer muon: it works on whole weight matrices or on Megatron's layer-wise buffers, and FSDP2 leaves "
            "each rank a slice of every weight. Write --optimizer adam or --optimizer sgd.",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {},
            "--recompute-granularity full, --recompute-method uniform, --recompute-num-layers 1: recompute is set in "
            "the YAML, where it is put in place before FSDP2 shards; inside the layers it would come a second time. "
            "Remove it and list the modules under recompute_modules, for instance 'decoder.layers.{*}'.",
        ),
        (
            "--bf16",
            {"param_dtype": "fp32"},
            "--bf16 with param_dtype: fp32: the flag and the YAML name different dtypes for the computation. Remove "
            "--bf16, or write param_dtype: bf16.",
        ),
        (
            "--bf16 --accumulate-allreduce-grads-in-fp32",
            {"reduce_dtype": "bf16"},
            "--bf16 with reduce_dtype: bf16: --bf16 makes Megatron sum gradients in fp32 "
            "(--accumulate-allreduce-grads-in-fp32). Write reduce_dtype: fp32, or add --grad-reduce-in-bf16.",
        ),
        (
            "--bf16 --fp32-residual-connection",
            {"param_dtype": "bf16"},
            "--fp32-residual-connection with cast_forward_inputs: true: every unit would round its inputs to bf16, the "
            "fp32 residual among them. Write cast_forward_inputs: false.",
        ),
        (
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 32 --calculate-per-token-loss",
            {},
            "--hybrid-context-parallel: the ranks would run different numbers of forwards, and FSDP2 gathers weights "
            "from all of them in each: the job would hang. Remove it.",
        ),
        (
            "--skip-train",
            {},
            "--skip-train: Megatron does not wrap a model that it only evaluates, so nothing would be sharded. Remove "
            "--use-torch-fsdp2 from such a run.",
        ),
        (
            "--fake-process-group",
            {},
            "--fake-process-group: its collectives exchange nothing, so the ranks cannot compare their configuration "
            "and plan. Remove it.",
        ),
        (
            "--no-initialization",
            {},
            "--no-initialization without --init-model-with-meta-device: weights that no checkpoint fills would be "
            "whatever lies in memory. Add --init-model-with-meta-device, which finds such weights before training, or "
            "remove it.",
        ),
        (
            "--ckpt-format torch",
            {},
            "--ckpt-format torch: Megatron writes the sharded weights of FSDP2 in the formats torch_dist and torch_dcp "
            "only. Write --ckpt-format torch_dcp.",
        ),
        (
            "--tensor-model-parallel-size 2",
            {},
            "--ckpt-format torch_dcp with --tensor-model-parallel-size 2: this format does not tell tensor-parallel "
            "ranks apart, so they overwrite each other's weights. Write --ckpt-format torch_dist.",
        ),
        (
            "--downcast-to-bf16",
            {},
            "--downcast-to-bf16 without --load or --pretrained-checkpoint: it rounds loaded weights, and nothing is "
            "loaded. Add --load or --pretrained-checkpoint, or remove it.",
        ),
        (
            "--non-persistent-ckpt-type global",
            {},
            "--ckpt-format torch_dcp with --non-persistent-ckpt-type global: Megatron reads non-persistent checkpoints "
            "in torch_dist only. Write --ckpt-format torch_dist, or remove it and use a smaller --save-interval.",
        ),
        (
            "--async-save",
            {},
            "--async-save without --use-persistent-ckpt-worker: Megatron then saves synchronously, with a warning. Add "
            "--use-persistent-ckpt-worker.",
        ),
        (
            "--torch-fsdp2-no-reshard-after-forward",
            {"reshard_after_forward": True},
            "--torch-fsdp2-no-reshard-after-forward with reshard_after_forward: true: the flag and the YAML say "
            "different things. Remove the flag and write reshard_after_forward: false in the YAML if that is what you "
            "want.",
        ),
        (
            "--distributed-backend nccl",
            {"offload_to_cpu": True},
            "offload_to_cpu: true with --distributed-backend nccl: gradients in host memory need a backend for CPU "
            "tensors beside the one for the device. Write --distributed-backend npu:hccl,cpu:gloo (Ascend) or "
            "cuda:nccl,cpu:gloo (NVIDIA).",
        ),
    ],
)
def test_message(parser: ArgumentParser, line: str, settings: dict[str, Any], expected: str) -> None:
    known = {option for action in parser._actions for option in action.option_strings}
    if any(flag in line and flag not in known for flag in NEWER_MEGATRON):
        pytest.skip("this Megatron is older than the flag")
    assert conflicts(parser, f"{FSDP2} {line}", **settings) == [expected]


def test_many_at_once_come_before_the_assertions_of_megatron(parser: ArgumentParser) -> None:
    line = "--use-torch-fsdp2 --use-distributed-optimizer --fp16 --pipeline-model-parallel-size 2 --async-save"
    with pytest.raises(ConflictError) as caught:
        check_conflicts(parse(parser, line), None, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert [text.split(":")[0] for text in str(caught.value).splitlines()] == [
        "--use-torch-fsdp2 without --fsdp2-config-path",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "--use-distributed-optimizer",
        "--pipeline-model-parallel-size 2",
        "--fp16",
        "--no-gradient-accumulation-fusion is missing",
        "--async-save",
        "--async-save without --use-persistent-ckpt-worker",
    ]


def test_notices(parser: ArgumentParser) -> None:
    args = parse(parser, f"{FSDP2} --overlap-grad-reduce --ddp-bucket-size 100 --bf16 --grad-reduce-in-bf16")
    assert notices(args, load_config({})) == [
        "--overlap-grad-reduce, --ddp-bucket-size 100: ignored, because FSDP2 has no gradient buckets and overlaps its "
        "communication by itself. Remove it; num_to_forward_prefetch and num_to_backward_prefetch in the YAML tune the "
        "overlap.",
        "--grad-reduce-in-bf16: ignored, because reduce_dtype in the YAML sets the precision in which FSDP2 reduces "
        "gradients. Write reduce_dtype: bf16 in the YAML.",
    ]


@pytest.mark.parametrize("backend", ["nccl", "gloo", "npu:hccl,cpu:gloo", "cuda:nccl,cpu:gloo"])
def test_backends(parser: ArgumentParser, backend: str) -> None:
    assert parse(parser, f"--distributed-backend {backend}").distributed_backend == backend


def test_adding_again_changes_nothing(parser: ArgumentParser) -> None:
    before = [(action.option_strings, action.choices) for action in parser._actions]
    assert [(action.option_strings, action.choices) for action in add_arguments(parser)._actions] == before


def test_flags_pass_through_parse_args_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.arguments import parse_args

    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *f"{MODEL} {FSDP2} --downcast-to-bf16".split()])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = parse_args(add_arguments)
    assert isinstance(args, argparse.Namespace)
    assert (args.fsdp2_config_path, args.downcast_to_bf16, args.world_size) == ("cfg.yaml", True, 4)
