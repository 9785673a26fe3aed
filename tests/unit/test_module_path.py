"""The grammar of module paths, what they select, and every message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from mindspeed_fsdp2.errors import ConfigError, ModulePathError
from mindspeed_fsdp2.module_path import ModulePath, ModuleTree, nearest


def names() -> list[str]:
    """A decoder whose first layer is dense and whose other three have two experts, beside a dict of towers."""
    layers = []
    for i in range(4):
        layers += [f"decoder.layers.{i}", f"decoder.layers.{i}.mlp"]
        if i:
            layers += [f"decoder.layers.{i}.mlp.experts{tail}" for tail in ("", ".0", ".1")]
    towers = ["towers", "towers.image", "towers.image.blocks", "towers.image.blocks.0", "towers.text"]
    return ["", "embedding", "decoder", "decoder.layers", *layers, "decoder.final_norm", *towers]


@pytest.fixture(scope="module")
def tree() -> ModuleTree:
    return ModuleTree(names())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embedding", ["embedding"]),
        ("decoder.layers.2", ["decoder.layers.2"]),
        ("decoder.layers.{*}", [f"decoder.layers.{i}" for i in range(4)]),
        ("decoder.layers.<*>", [f"decoder.layers.{i}" for i in range(4)]),
        ("decoder.layers.{1}", ["decoder.layers.1"]),
        ("decoder.layers.{0-1,3}", ["decoder.layers.0", "decoder.layers.1", "decoder.layers.3"]),
        ("decoder.layers.<3, 0 - 1>", ["decoder.layers.0", "decoder.layers.1", "decoder.layers.3"]),
        ("decoder.layers.{0-2,1-3}", [f"decoder.layers.{i}" for i in range(4)]),
        ("decoder.layers.{*}.mlp.experts", [f"decoder.layers.{i}.mlp.experts" for i in (1, 2, 3)]),
        (
            "decoder.layers.{1,3}.mlp.experts.{*}",
            [f"decoder.layers.{i}.mlp.experts.{j}" for i in (1, 3) for j in (0, 1)],
        ),
        ("decoder.layers.{*}.mlp.experts.{1}", [f"decoder.layers.{i}.mlp.experts.1" for i in (1, 2, 3)]),
        ("towers.{*}", ["towers.image", "towers.text"]),
        ("{*}", ["embedding", "decoder", "towers"]),
    ],
)
def test_select_returns_fqns_in_model_order(tree: ModuleTree, text: str, expected: list[str]) -> None:
    assert ModulePath.parse(text).select(tree) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "module path '' is empty. Write the name of a module, e.g. decoder.layers.{*}."),
        (" ", "module path ' ' is empty. Write the name of a module, e.g. decoder.layers.{*}."),
        ("a..b", "module path 'a..b' has an empty segment. Write names joined by single dots, e.g. decoder.layers.0."),
        (".a", "module path '.a' has an empty segment. Write names joined by single dots, e.g. decoder.layers.0."),
        ("layers.{20-0}", "module path 'layers.{20-0}': the range 20-0 runs backwards. Write 0-20."),
        (
            "layers.{0-}",
            "module path 'layers.{0-}': '0-' is not an index or a range. Write {*}, {3}, {0-20} or {0-20,22-40}.",
        ),
        (
            "layers.{}",
            "module path 'layers.{}': '' is not an index or a range. Write {*}, {3}, {0-20} or {0-20,22-40}.",
        ),
        (
            "layers.{-1}",
            "module path 'layers.{-1}': '-1' is not an index or a range. Write {*}, {3}, {0-20} or {0-20,22-40}.",
        ),
        (
            "layers.{0,٣}",
            "module path 'layers.{0,٣}': '٣' is not an index or a range. Write {*}, {3}, {0-20} or {0-20,22-40}.",
        ),
        (
            "layers{*}",
            "module path 'layers{*}': a group must fill a whole segment, not share 'layers{*}'. Write 'layers.{*}'.",
        ),
        (
            "layers.<0-20",
            "module path 'layers.<0-20': '<' has no partner in '<0-20'. Write a group as \"layers.{0-3}\".",
        ),
        ("22-40>", "module path '22-40>': '>' has no partner in '22-40>'. Write a group as \"layers.{0-3}\"."),
        ("a.{0-3>", "module path 'a.{0-3>': '{' has no partner in '{0-3>'. Write a group as \"layers.{0-3}\"."),
        ("layers.*", "module path 'layers.*' has a '*' outside braces. Write {*} for every child."),
        (
            "layers[0]",
            "module path 'layers[0]': 'layers[0]' has square brackets. Write an index as layers.0 or layers.{0-3}.",
        ),
        ("a,b", "module path 'a,b': 'a,b' has a comma. Write every path as a list entry of its own."),
        ("a. b", "module path 'a. b' has a space beside a dot or at an end. Remove it."),
        ("x - y", "module path 'x - y' is two list entries run together. Indent all entries alike."),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ModulePathError) as error:
        ModulePath.parse(text)
    assert str(error.value) == message
    assert isinstance(error.value, ConfigError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "decoder.layer.{*}",
            "module path 'decoder.layer.{*}' selects no module: decoder has no child 'layer'. Write 'decoder.layers.{*}'.",
        ),
        (
            "layers.{*}",
            "module path 'layers.{*}' selects no module: the model has no child 'layers'. Write 'decoder.layers.{*}'.",
        ),
        (
            "module.decoder.layers.{*}",
            "module path 'module.decoder.layers.{*}' selects no module: the model has no child 'module'. "
            "Write 'decoder.layers.{*}'.",
        ),
        ("mlp", "module path 'mlp' selects no module: the model has no child 'mlp'. Write 'decoder.layers.{*}.mlp'."),
        (
            "vision",
            "module path 'vision' selects no module: the model has no child 'vision'. "
            "Its children are embedding, decoder, towers.",
        ),
        (
            "decoder.layers.7",
            "module path 'decoder.layers.7' selects no module: decoder.layers has no child '7'. Its indices are 0-3.",
        ),
        (
            "decoder.layers.{*}.mlp.expert",
            "module path 'decoder.layers.{*}.mlp.expert' selects no module: decoder.layers.0.mlp has no child 'expert'. "
            "Write 'decoder.layers.{*}.mlp.experts'.",
        ),
        (
            "decoder.final_norm.{*}",
            "module path 'decoder.final_norm.{*}' selects no module: decoder.final_norm has no children. "
            "Write 'decoder.final_norm'.",
        ),
        (
            "decoder.final_norm.weight",
            "module path 'decoder.final_norm.weight' selects no module: decoder.final_norm has no child 'weight'. "
            "Write 'decoder.final_norm' for the module itself.",
        ),
        (
            "decoder.layers.{0-4}",
            "module path 'decoder.layers.{0-4}': decoder.layers has no index 4, only 0-3. "
            "Write indices out of 0-3, or {*} for all of them.",
        ),
        (
            "decoder.layers.{1,7-900000000}",
            "module path 'decoder.layers.{1,7-900000000}': decoder.layers has no indices 7-900000000, only 0-3. "
            "Write indices out of 0-3, or {*} for all of them.",
        ),
        (
            "towers.{0}",
            "module path 'towers.{0}': towers has no index 0. Its children are image, text.",
        ),
        (
            "decoder.layers.{*}.mlp.experts.{0-3}",
            "module path 'decoder.layers.{*}.mlp.experts.{0-3}': decoder.layers.1.mlp.experts has no indices 2-3, "
            "only 0-1. Write indices out of 0-1, or {*} for all of them.",
        ),
        (
            "decoder.layers.{0-3}.mlp.experts",
            "module path 'decoder.layers.{0-3}.mlp.experts': decoder.layers.0.mlp has no child 'experts'. "
            "Write 'decoder.layers.{*}.mlp.experts'.",
        ),
    ],
)
def test_select_refuses_and_says_what_to_write(tree: ModuleTree, text: str, message: str) -> None:
    with pytest.raises(ModulePathError) as error:
        ModulePath.parse(text).select(tree)
    assert str(error.value) == message


def test_every_suggested_path_selects_something(tree: ModuleTree) -> None:
    for text in ("decoder.layer.{*}", "layers.{*}", "mlp", "decoder.layers.{*}.mlp.expert", "blocks.{0}"):
        with pytest.raises(ModulePathError) as error:
            ModulePath.parse(text).select(tree)
        suggestions = str(error.value).partition(" Write ")[2].removesuffix(".").split(" or ")
        assert suggestions != [""]
        for suggestion in suggestions:
            assert ModulePath.parse(suggestion.strip("'")).select(tree)


def test_gaps_between_indices_are_named() -> None:
    tree = ModuleTree(["layers", "layers.0", "layers.1", "layers.4"])
    with pytest.raises(ModulePathError) as error:
        ModulePath.parse("layers.{0-5}").select(tree)
    assert str(error.value) == (
        "module path 'layers.{0-5}': layers has no indices 2-3,5, only 0-1,4. "
        "Write indices out of 0-1,4, or {*} for all of them."
    )


def test_long_lists_of_children_are_cut() -> None:
    tree = ModuleTree([f"block_{letter}" for letter in "abcdefghijk"])
    with pytest.raises(ModulePathError, match="block_a, .*, block_h and 3 more"):
        ModulePath.parse("nothing_like_it").select(tree)


def test_paths_that_select_the_same_are_equal() -> None:
    assert ModulePath.parse("a.{0-1,2}") == ModulePath.parse("a.<0,1-2>")
    assert hash(ModulePath.parse("a.{*}")) == hash(ModulePath.parse("a.<*>"))
    assert ModulePath.parse("a.{0}") != ModulePath.parse("a.0")
    assert ModulePath.parse("a.<*>").text == "a.<*>"


def test_only_paths_without_groups_are_plain() -> None:
    assert ModulePath.parse("package.module.Layer").is_plain
    assert not ModulePath.parse("layers.{0}").is_plain


def test_tree_refuses_children_before_parents() -> None:
    with pytest.raises(ValueError, match=r"module 'a\.b' comes before 'a'"):
        ModuleTree(["a.b", "a"])


def test_tree_keeps_names_in_model_order_without_the_root() -> None:
    tree = ModuleTree(iter(names()))
    assert list(tree.fqns) == names()[1:]
    assert "decoder.layers.3" in tree
    assert "decoder.layers.4" not in tree
    assert dict(tree.children("towers")) == {"image": "towers.image", "text": "towers.text"}


class CountingTree(ModuleTree):
    """Counts how often somebody looks below a module."""

    def __init__(self, fqns: Iterable[str]) -> None:
        super().__init__(fqns)
        self.visits = 0

    def children(self, fqn: str) -> Mapping[str, str]:
        self.visits += 1
        return super().children(fqn)


@pytest.mark.parametrize("layers", [10, 12_500])
def test_cost_of_a_path_is_what_it_visits(layers: int) -> None:
    fqns = ["embedding", "layers"]
    for i in range(layers):
        fqns += [f"layers.{i}", f"layers.{i}.norm", f"layers.{i}.mlp", f"layers.{i}.attention"]
    tree = CountingTree(fqns)
    for text, visits, selected in [
        ("layers.3.mlp", 3, 1),
        ("layers.{2-5}.mlp", 2 + 4, 4),
        ("layers.{*}", 2, layers),
        ("layers.{*}.mlp", 2 + layers, layers),
    ]:
        tree.visits = 0
        assert len(ModulePath.parse(text).select(tree)) == selected
        assert tree.visits == visits


def test_nearest_returns_the_best_first() -> None:
    assert nearest("sharding_siz", ["param_dtype", "sharding_size"]) == ["sharding_size"]
    assert nearest("zzz", ["param_dtype"]) == []
