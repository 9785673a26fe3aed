"""``mindspeed-fsdp2 checkpoint export|import|info|verify``: between checkpoints and Hugging Face weights."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError, ConfigError, FSDP2Error
from .models import build_model

if TYPE_CHECKING:
    from torch import nn

    from ..checkpoint.coordination import Coordination

_MODEL = "directory with a config.json of Transformers, or package.module:function that returns the model"
_DTYPES = ("keep", "bf16", "fp16", "fp32")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``checkpoint`` to the parser of the ``mindspeed-fsdp2`` command (**in place**)."""
    about = "convert, describe and verify checkpoints and Hugging Face weights"
    more = "Processes share the work: torchrun --nproc_per_node 4 -m mindspeed_fsdp2.cli checkpoint"
    parser = commands.add_parser("checkpoint", help=about, description=f"{about[0].upper()}{about[1:]}. {more} ...")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    about = "write the model in a checkpoint as Hugging Face safetensors"
    export = actions.add_parser("export", help=about, description=f"{about[0].upper()}{about[1:]}.")
    export.add_argument(
        "source", metavar="CHECKPOINT", help="directory given to save_checkpoint, or one checkpoint in it"
    )
    export.add_argument("target", metavar="DIRECTORY", help="what is written; complete or absent")
    export.add_argument("--model", help=f"{_MODEL}; a directory's config.json, tokenizer and the like are copied")
    export.add_argument("--dtype", choices=_DTYPES, default="keep", help="of floating-point tensors; default: keep")
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of one file; default: 5GB")
    export.add_argument("--step", type=int, help="the checkpoint of this step instead of the newest")
    export.set_defaults(run=_export)

    about = "make a checkpoint for load_checkpoint of Hugging Face safetensors"
    imports = actions.add_parser("import", help=about, description=f"{about[0].upper()}{about[1:]}.")
    imports.add_argument("source", metavar="WEIGHTS", help="directory of save_pretrained, or a .safetensors file")
    imports.add_argument("target", metavar="DIRECTORY", help="directory for load_checkpoint; holds no checkpoint yet")
    imports.add_argument("--model", help=f"{_MODEL}; default: WEIGHTS, where it has a config.json")
    imports.add_argument("--dtype", choices=_DTYPES, default="keep", help="of floating-point tensors; default: keep")
    imports.add_argument("--step", type=int, default=0, help="step that the checkpoint gets; default: 0")
    imports.set_defaults(run=_import)

    about = "list tensors, sizes, dtypes, step and ranks"
    info = actions.add_parser("info", help=about, description=f"{about[0].upper()}{about[1:]}.")
    info.add_argument("source", metavar="PATH", help="a checkpoint, or Hugging Face weights")
    info.add_argument("--step", type=int, help="the checkpoint of this step instead of the newest")
    info.set_defaults(run=_info)

    about = "read every byte and say what is missing or damaged"
    verify = actions.add_parser("verify", help=about, description=f"{about[0].upper()}{about[1:]}.")
    verify.add_argument("source", metavar="PATH", help="a checkpoint, or Hugging Face weights")
    verify.add_argument("--model", help=f"{_MODEL}, which names and shapes must fit")
    verify.add_argument("--step", type=int, help="the checkpoint of this step instead of the newest")
    verify.set_defaults(run=_verify)


def _export(arguments: argparse.Namespace) -> int:
    from ..checkpoint.hf_convert import ExportOptions, export_checkpoint
    from ..checkpoint.hf_shards import parse_dtype, parse_size
    from ..checkpoint.hf_source import kind_of

    with _processes() as ranks:
        source = Path(arguments.source)
        ranks.agree(lambda: _expect("dcp", kind_of(source), source), "export")
        folder = Path(arguments.model) if arguments.model is not None and Path(arguments.model).is_dir() else None
        model = ranks.agree(lambda: _model(arguments.model), "export")
        size = ranks.agree(lambda: parse_size(arguments.max_shard_size, "--max-shard-size"), "export")
        options = ExportOptions(arguments.step, parse_dtype(arguments.dtype, "--dtype"), size, folder, model)
        target = export_checkpoint(source, Path(arguments.target), options, ranks)
        if ranks.rank == 0:
            if folder is None:
                print("note: there is no config.json beside the weights, which from_pretrained() needs. Copy it there, "
                      "or export with --model DIRECTORY.", file=sys.stderr)  # fmt: skip
            print(f"{target}: written.")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from ..checkpoint.hf_import import import_weights
    from ..checkpoint.hf_shards import parse_dtype
    from ..checkpoint.hf_source import kind_of

    with _processes() as ranks:
        source = Path(arguments.source)
        ranks.agree(lambda: _expect("hf", kind_of(source), source), "import")
        if arguments.step < 0:
            raise CheckpointError(f"--step: {arguments.step} is not a number of finished steps. Write 0 or more.")
        name = arguments.model
        if name is None and (source / "config.json").is_file() and importlib.util.find_spec("transformers"):
            name = arguments.source
        model = ranks.agree(lambda: _model(name), "import")
        if model is None and ranks.rank == 0:
            print("note: no model to compare with, so the checkpoint gets the names in the files; a tied weight may "
                  "lack one. Install transformers, or add --model.", file=sys.stderr)  # fmt: skip
        dtype = parse_dtype(arguments.dtype, "--dtype")
        path = import_weights(source, Path(arguments.target), arguments.step, dtype, model, ranks)
        if ranks.rank == 0:
            print(f"{path}: written. Load it with load_checkpoint({arguments.target!r}, model).")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from ..checkpoint.hf_info import describe_hf, describe_saved
    from ..checkpoint.hf_source import kind_of, open_hf, open_saved

    source = Path(arguments.source)
    if kind_of(source) == "dcp":
        lines = describe_saved(open_saved(source, arguments.step))
    else:
        lines = describe_hf(open_hf(source))
    print("\n".join(lines))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ..checkpoint.hf_shards import size_text
    from ..checkpoint.hf_source import kind_of
    from ..checkpoint.hf_verify import raise_if_wrong, verify_hf, verify_saved

    with _processes() as ranks:
        source = Path(arguments.source)
        kind = ranks.agree(lambda: kind_of(source), "verify")
        model = ranks.agree(lambda: _model(arguments.model), "verify")
        if kind == "dcp":
            found = verify_saved(source, arguments.step, model, ranks)
        else:
            found = verify_hf(source, model, ranks)
        raise_if_wrong(found, source)
        if ranks.rank == 0:
            fit = ", as in the model" if model is not None else ""
            print(f"{source}: {found.tensors} tensors are there{fit}; all {size_text(found.nbytes)} can be read.")
    return 0


def _expect(wanted: str, found: str, path: Path) -> None:
    if wanted == found:
        return
    if found == "hf":
        raise CheckpointError(f"{path}: it holds Hugging Face weights already. Name what save_checkpoint wrote.")
    raise CheckpointError(f"{path}: it holds a checkpoint of save_checkpoint already. Name Hugging Face weights.")


def _model(name: str | None) -> nn.Module | None:
    if name is None:
        return None
    if Path(name).is_dir() and not importlib.util.find_spec("transformers"):
        if not (Path(name) / "config.json").is_file():
            raise ConfigError(f"--model: {name} holds no config.json. Name the directory of a model of Transformers.")
        return None  # its files can be copied all the same
    try:
        return build_model(name)
    except (OSError, ValueError) as error:  # of Transformers, about the config.json
        if isinstance(error, FSDP2Error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--model: {name}: {reason} Name the directory of a model of Transformers.") from error


@contextlib.contextmanager
def _processes() -> Iterator[Coordination]:
    """Connect the processes of torchrun, or be alone; log progress to stderr meanwhile.

    An error ends all processes; the first one tells it.
    """
    import torch.distributed as dist
    from torch import nn

    from ..checkpoint.coordination import Coordination
    from ..checkpoint.hf_alone import Alone

    own = dist.is_torchelastic_launched() and not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    ranks = Coordination(nn.Module(), None) if dist.is_initialized() else Alone()
    try:
        with _progress():
            yield ranks
    except FSDP2Error:
        if own and ranks.rank != 0:
            sys.exit(1)
        raise
    finally:
        # A group of another program is left as it is, with ours in it: a later one over the same ranks would get the
        # same name, and could find the addresses of the one that ended.
        if own:
            dist.destroy_process_group()


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    logger = logging.getLogger("mindspeed_fsdp2")
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
