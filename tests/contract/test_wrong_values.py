"""Wrong values of every argument of every public callable raise in the standard wording, before anything is changed."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from good_arguments import CHAIN, OWN, ROWS, of, public
from torch import Tensor

from funcops import (
    AddConfig,
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    IdentityConfig,
    LinearConfig,
    Needs,
    Op,
    ParallelConfig,
    Step,
    add,
    chain,
    donate,
    linear,
    nn,
    random,
    rewrite,
    schedule,
    walk,
)
from funcops.engine.contract.schema import Saved
from funcops.engine.errors import (
    BorrowedError,
    CaptureError,
    DonatedError,
    GradModeError,
    GraphOrderError,
    LedgerError,
    StaleResidualError,
    describe,
)
from funcops.engine.residuals.nested import Nested
from funcops.engine.trees import leaf, paths, put, tensors, tree_map_tensors
from funcops.testing import LAWS, check_op

ERRORS = (
    ValueError,
    TypeError,
    OSError,
    DonatedError,
    GradModeError,
    StaleResidualError,
    LedgerError,
    CaptureError,
    GraphOrderError,
    BorrowedError,
)
WORDING = re.compile(r"^.*: .* must .*, got\s.*", re.S)
NAN, INF = float("nan"), float("inf")


class Odd:
    """An object that no function takes."""

    def __repr__(self):
        return "Odd()"


def complex_of(t):
    """A complex tensor like t: torch 2.14 has a complex dtype for bfloat16, without products."""
    return t.to(torch.complex128 if t.dtype is torch.float64 else torch.complex64)


def wrong_values(good):
    """Wrong values for an argument whose good value is `good`."""
    if isinstance(good, bool):
        return 1, "yes", None
    if isinstance(good, int):
        return True, 1.5, "3", None, NAN, -1
    if isinstance(good, float):
        return True, "0.5", None, NAN, INF, -1.0, 1j
    if isinstance(good, str):
        return 3, None, "no such", ""
    if isinstance(good, torch.dtype):
        return "float32", 3, torch.int64
    if isinstance(good, Tensor):
        return None, 3.0, "x", [1.0], good.to(torch.complex64), good.new_zeros(3, 5), good.to("meta") if good.dim() else Odd()
    if isinstance(good, Needs):
        return True, "x", None, Needs(params=("no.such",), x=False)
    if isinstance(good, Op):
        return None, "linear", 3
    if dataclasses.is_dataclass(good) and hasattr(good, "__hash__") and not tensors(good):
        return None, 3, "x", Odd(), IdentityConfig()
    if isinstance(good, Path):
        return None, 3, Odd(), [], Path("no such") / "folder"
    if callable(good):
        return None, 3, "x"
    if hasattr(good, "kind") or isinstance(good, list):  # what a forward kept is not looked into on the way back
        return None, 3, "x", Odd(), []
    return (
        None,
        3,
        "x",
        Odd(),
        [],
        *[put(good, path, bad) for path, t in paths(good).items() if isinstance(t, Tensor) for bad in ("x", complex_of(t))],
    )


def values_of(row, name, good, default):
    given = row.good()[name]
    for value in (*wrong_values(given), *row.also.get(name, ())):
        if not (value is default or (type(value) is type(default) and not tensors(value) and value == default)):
            yield value


def label(value):
    """A value as the table of exceptions writes it: `float32[2, 2]` for a tensor, also inside a tree."""
    return describe(value) if isinstance(value, Tensor) else repr(tree_map_tensors(Shown, value))


class Shown(str):
    __repr__ = str.__str__

    def __new__(cls, tensor):
        return super().__new__(cls, describe(tensor))


def state(values):
    return [(t.clone(), t._version) for t in tensors(list(values.values())) if not t.is_meta]


def called(call, given):
    """A call by name, or by position if the table gives values for its `*args`."""
    several = [n for n, p in inspect.signature(call).parameters.items() if p.kind is p.VAR_POSITIONAL and n in given]
    rest = [one for n in several for one in given[n]]
    first = [value for n, value in given.items() if rest and n not in several]
    return call(*first, *rest) if rest else call(**given)


def problems(name):
    row, call = ROWS[name], of(name)
    parameters = inspect.signature(call).parameters
    for argument, parameter in parameters.items():
        if argument in row.accepts or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if argument not in row.good():
            yield f"{argument}: has no good value in the table"
            continue
        for value in values_of(row, argument, row.good()[argument], parameter.default):
            if (argument, label(value)) in row.accepts or (argument == "device" and value == 3 and torch.backends.cuda.is_built()):
                continue  # of a torch with CUDA that is the number of a device
            given = {**row.good(), argument: value}
            before = state(given)
            what = f"{argument}={label(value)}"
            try:
                called(call, given)
            except (*ERRORS, IndexError) as error:  # ids out of range
                if not WORDING.match(str(error)):
                    yield f"{what}: {type(error).__name__}: {error}"
            except Exception as error:
                yield f"{what}: {type(error).__name__}: {error}"
            else:
                yield f"{what}: went through"
            for (copy, _), t in zip(before, [t for t in tensors(list(given.values())) if not t.is_meta], strict=False):
                if not torch.equal(
                    torch.nan_to_num(torch.view_as_real(copy) if copy.is_complex() else copy.float()),
                    torch.nan_to_num(torch.view_as_real(t) if t.is_complex() else t.float()),
                ):
                    yield f"{what}: wrote to {describe(t)}"


SLOW = "models.decode", "models.generate", "models.to_hf"


def cases():
    """The first tier has the forward and the dgrad of most ops, which check what the other functions do."""
    for name in sorted(ROWS):
        op, _, half = name.rpartition("_")
        later = name not in OWN and half not in ("fwd", "dgrad") and op not in ("linear", "attention")
        yield pytest.param(name, marks=pytest.mark.slow) if later or name in SLOW else name


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in an empty folder, as some callables write files."""
    monkeypatch.chdir(tmp_path)


def test_every_public_callable_has_a_row():
    missing = sorted(set(public()) - set(ROWS))
    assert not missing, f"give good arguments of {missing} in tests/helpers/good_arguments.py"
    assert not sorted(set(ROWS) - set(public())), "rows of what is not public"


@pytest.mark.parametrize("name", list(cases()))
def test_good_arguments_are_good_and_wrong_values_raise(name):
    called(of(name), ROWS[name].good())
    found = [line.splitlines()[0][:200] for line in problems(name)]
    assert not found, "\n".join(["", *found])


TREE = {"a": torch.ones(2)}
LAYER = Step("a", linear, LinearConfig(1, 1))
ADDS = ChainConfig(steps=(Step("s", add, AddConfig(), takes=("r",)),), extras=("r",))
SEEN = {  # by users, one each
    "LinearConfig: in_features must be int, got '3'": lambda: LinearConfig("3", 2),
    "LinearConfig: bias must be bool, got 'False'": lambda: LinearConfig(3, 2, bias="False"),
    "EmbeddingConfig: num_embeddings must be int, got True": lambda: EmbeddingConfig(True, 3),
    "CrossEntropyConfig: z_loss must be": lambda: CrossEntropyConfig(z_loss=INF),
    "ChainConfig: steps must be tuple, got list": lambda: ChainConfig(steps=[]),
    "ChainConfig: extras must be tuple, got 's'": lambda: ChainConfig(steps=(Step("a", linear, LinearConfig(1, 1)),), extras="s"),
    "ChainConfig: steps must be Step, got Op linear": lambda: ChainConfig(steps=(LAYER, linear)),
    "ChainConfig: extras must be different names, got ('s', 's')": lambda: ChainConfig(steps=(LAYER,), extras=("s", "s")),
    "ChainConfig: recompute must be a bool, or names of steps (a), got ['b']": lambda: ChainConfig(
        steps=(LAYER,), recompute=("b",)
    ),
    "ParallelConfig: branches must be Step, got Op linear": lambda: ParallelConfig(branches=(LAYER, linear)),
    "ParallelConfig: branches must be uniquely named, got ['a', 'a']": lambda: ParallelConfig(branches=(LAYER, LAYER)),
    "Step 'c': takes must be () or ('r',), got ('q', 'r')": lambda: Step("c", chain, ADDS, takes=("q", "r")),
    "walk: path must be str, got 3": lambda: walk(CHAIN, path=3),
    "rewrite: path must be str, got 3": lambda: rewrite(CHAIN, lambda part: None, path=3),
    "leaf: each_of must be str, got 3": lambda: leaf("[n]", each_of=3),
    "LinearCrossEntropyLoss: out_features must be at least 1, got 0": lambda: nn.LinearCrossEntropyLoss(4, 8, out_features=(0,)),
    "Schedule: ranks.0 must be tuple or list, got 3": lambda: schedule.Schedule("mine", (3,)),
    "linear_init: dtype must be float64 or float32 or bfloat16 or float16, got int64": lambda: linear.init(
        LinearConfig(1, 1), key=random.key(0), dtype=torch.int64
    ),
    "random.split: n must be at least 1, got 0": lambda: random.split(random.key(0), 0),
    "put: path must be one of a, got 'b'": lambda: put(TREE, "b", 1),
    "simulate: costs must be Costs or tuple or list, got 1.0": lambda: schedule.simulate(schedule.gpipe(1, 1), 1.0),
    "Schedule 'far': rank 0 must be of stages and microbatches below its 1 actions, got 0F999999999999": lambda: schedule.Schedule(
        "far", ((schedule.Action.parse("0F999999999999"),),)
    ),
}


@pytest.mark.parametrize("said", SEEN)
def test_mistakes_of_users_raise(said):
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        SEEN[said]()


def broken(part, how):
    """linear with one function that raises, or returns nothing useful."""

    def instead(*args, **options):
        if how is not None:
            raise how
        return None, None

    return linear._replace(**{part: instead})


FIRST_LAWS = ("mirror", "pure", "right")


@pytest.mark.parametrize(
    "law",
    [
        pytest.param(law, marks=[] if law in FIRST_LAWS else pytest.mark.slow)
        for law in LAWS
        if law not in ("compiles", "finite_differences")
    ],
)
def test_check_op_names_the_law_whatever_fails(law):
    for part in ("fwd", "bwd", "dgrad", "wgrad"):
        for how in (None, RuntimeError("broken"), KeyError("broken"), AssertionError("broken")):
            options = dict(x=lambda d: d.randn(2, 4), reference=torch.nn.functional.linear, laws=(law,), dtypes=(torch.float32,))
            try:
                check_op(broken(part, how), cfg=LinearConfig(4, 4), **options)
            except AssertionError as error:
                assert str(error).startswith(f"law '{law}', torch.float32: ")


TAKES_A_TREE = ("tree", "node", "kept", "packed", "residuals", "pending", "pendings", "a", "b")
READS_NOTHING = {  # of what was given away, and why
    ("trees.show", "node"): "a repr says so",
    ("trees.has", "tree"): "names alone",
    ("trees.stands_for_one", "node"): "its class alone",
    ("trees.at", "tree"): "the field of a node, which says so when it is used",
    ("donate", "kept"): "a cell is given away once and for all",
    ("models.decoder", "packed"): "a flag, and no tree",
    **dict.fromkeys((("compare", "a"), ("compare", "b")), "recordings, and no trees"),
}


def given_away():
    """Donated nodes by name, the cells that hold them, and a cell that a backward consumed."""
    params, x = chain.init(CHAIN, key=random.key(0)), torch.ones(2, 4)
    made = {"a node": linear.fwd(params["a"], x, LinearConfig(4, 4))[1], "a chain's node": chain.fwd(params, x, CHAIN)[1]}
    cells = {name: donate(node) for name, node in made.items()}
    spent = donate(linear.fwd(params["a"], x, LinearConfig(4, 4))[1])
    linear.bwd(spent, x, LinearConfig(4, 4))
    return {**made, "a cell": cells["a node"], "a cell of a chain": cells["a chain's node"], "a spent cell": spent}


@pytest.mark.slow
def test_every_function_of_a_tree_refuses_a_donated_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong, asked = [], 0
    for name, row in ROWS.items():
        for argument in [each for each in row.good() if each in TAKES_A_TREE]:
            for what, node in given_away().items():
                good = row.good()
                own = good[argument]
                if own is None:  # an op without params has no pending
                    continue
                # the op's own, apart from one that lacks its params, which nothing but `with_params` takes
                if (isinstance(own, (Saved, Nested)) and name != "with_params") or argument == "pendings":
                    one = own[0] if argument == "pendings" else own
                    cell = donate(one)
                    if "cell" in what:
                        cell.take("here")
                    node = one if "node" in what else cell
                    node = [node] if argument == "pendings" else node
                if "path" in good:
                    good["path"] = "x"
                asked += 1
                try:
                    of(name)(**{**good, argument: node})
                except DonatedError:
                    continue
                except TypeError as error:  # or no such thing is taken at all
                    if not (name == "trees.replace" and what != "a node" and WORDING.match(str(error))):
                        wrong.append((name, argument, what, repr(error)))
                except Exception as error:
                    wrong.append((name, argument, what, repr(error)))
                else:
                    wrong.append((name, argument, what))
    found = {(name, argument) for name, argument, *_ in wrong}
    assert asked > 200 and found == READS_NOTHING.keys(), "\n".join(map(str, wrong))
