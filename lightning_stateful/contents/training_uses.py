"""Tells from source which attributes of a module, a callback or an optimizer training goes by."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

from lightning_stateful.contents.code_uses import (
    attributes_read,
    called_name,
    functions_naming,
    is_set_anew,
    uses_of,
)
from lightning_stateful.generators.attributes import defaults_of_class, is_users, methods_of, names_in

# Functions of a module that train; Lightning's own lead to them.
_TRAINS = frozenset(
    {
        *("training_step", "forward", "on_train_batch_start", "on_after_backward", "on_before_optimizer_step"),
        *("configure_gradient_clipping", "optimizer_step"),
    }
)
# Hooks of a callback between two steps of an optimizer.
_BETWEEN_STEPS = frozenset(
    {
        *(
            "on_train_start",
            "on_train_epoch_start",
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
        ),
        *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
    }
)
# Those that see a batch before, also of a data module.
_TRANSFERS = frozenset({"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"})
# Methods that change what they are called of; so do those of torch whose names end with an underscore.
_CHANGE = {"load_state_dict", "step", "backward", "manual_backward"}


def leaf_of(name: str) -> str:
    """The last attribute in a name with dots, without the place of an item in it."""
    return name.rpartition(".")[2].partition("[")[0]


def _first_of(name: str) -> str:
    return name.partition("[")[0].partition(".")[0]


def trains_with(module: torch.nn.Module, name: str) -> bool:
    """Whether code that trains uses an attribute of the module, or of a part of it, as an earlier batch has left it."""
    for prefix, part in module.named_modules():
        inner = name[len(prefix) + 1 :] if prefix and name.startswith(f"{prefix}.") else "" if prefix else name
        leaf = _first_of(inner)
        # One that is not set yet may have its value from the class, or from the first batch. Callbacks' have a dot.
        is_held = leaf in vars(part) or leaf in defaults_of_class(part) or (inner and "." not in inner)
        if is_held and is_users(type(part).__module__):
            # Of what an object in an attribute holds, that name.
            last = leaf_of(inner)
            held = vars(part).get(leaf)
            # Of a function it is a variable.
            how = {"may_be_called": callable(held), "is_variable": isinstance(held, FunctionType) and "." in inner}
            use = uses_of(module, last, **how, read=_TRAINS)
            return use.uses and (use.carries or not is_set_anew(module, last, _TRAINS))
    return False


def steps_with(optimizers: Iterable[torch.optim.Optimizer], name: str) -> bool:
    """Whether an attribute, such as ``"Sgd.count"``, is one of a user's optimizer that its ``step()`` uses."""
    owners = [one for one in optimizers if name.startswith(f"{type(one).__qualname__}.")]
    read = frozenset({"step"})
    leaves = [(one, _first_of(name[len(type(one).__qualname__) + 1 :])) for one in owners]
    return any(uses_of(one, leaf, read=read).uses for one, leaf in leaves if is_users(type(one).__module__))


def changes_training_with(callbacks: Iterable[Any], name: str) -> bool:
    """Whether an attribute, such as ``"Clip.norms"``, is one of a callback by which its hooks change training.

    That is one from which a function sets something of another object, such as a learning rate, or with which it calls
    a method that changes one in place, as far as the source of that function tells.

    Args:
        callbacks: The callbacks.
        name: The name.
    """
    for one in callbacks:
        if name.startswith(f"{type(one).__qualname__}."):
            leaf = _first_of(name[len(type(one).__qualname__) + 1 :])
            use = uses_of(one, leaf, read=_BETWEEN_STEPS)
            is_left = use.carries or not is_set_anew(one, leaf, _BETWEEN_STEPS)
            found = functions_naming(one, leaf, _BETWEEN_STEPS)
            return use.uses and is_left and any(_changes_others(function, own, leaf) for function, own in found)
    return False


def changes_in_place(owner: Any, hook: str) -> bool:
    """Whether a hook, or what it calls by name, names methods or functions of torch that change a tensor in place."""
    return any(map(_is_in_place, names_in_hook(owner, hook)))


def names_in_hook(owner: Any, hook: str) -> set[str]:
    """What a hook of the user's, and the methods and functions of the user's that it names, name."""
    methods = {one.__name__: one for one in reversed(methods_of(owner))}
    left, seen = [methods[hook]] if hook in methods else [], list[FunctionType]()
    while left:
        function = left.pop()
        seen.append(function)
        called = [methods.get(name) or function.__globals__.get(name) for name in names_in(function.__code__)]
        own = [one for one in called if isinstance(one, FunctionType) and is_users(one.__module__)]
        left += [one for one in own if one not in (*seen, *left)]
    return {name for one in seen for name in names_in(one.__code__)}


def _changes_others(function: ast.AST, own: str, leaf: str) -> bool:
    """Whether a method changes something by an attribute, but for its own object, ``own``, and what it has made."""
    parts = list(ast.walk(function))
    assigns = [(target, value, part) for part in parts for target, value in _sets(part)]
    made = [target for target, value, part in assigns if isinstance(part, ast.Assign) and _is_made(value, own)]
    kept = {own, *(target.id for target in made if isinstance(target, ast.Name))}
    changes = [(target, part) for target, _, part in assigns]
    changes += [(part.func, part) for part in parts if isinstance(part, ast.Call) and _changes(called_name(part))]
    follows = _following(parts, leaf)
    return any(
        isinstance(target, (ast.Attribute, ast.Subscript))
        and _root_of(target) not in kept
        and not _is_of_metrics(target)
        and (part in follows or _has(part, follows))
        for target, part in changes
    )


def _is_made(value: ast.expr | None, own: str) -> bool:
    """Whether an expression makes something new, and is no name of what there is, nor a method of another object."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) or _root_of(value.func) == own
    return not isinstance(value, (ast.Name, ast.Attribute, ast.Subscript))


def _following(parts: list[ast.AST], leaf: str) -> set[ast.AST]:
    """What of a function is an attribute, a variable that is set from it, or stands under a condition on these."""
    found: set[ast.AST] = {part for part in parts if isinstance(part, ast.Attribute) and part.attr == leaf}
    before = -1
    while len(found) > before:
        before = len(found)
        for part in parts:
            if isinstance(part, (ast.If, ast.While)) and _has(part.test, found):
                found |= {one for step in [*part.body, *part.orelse] for one in ast.walk(step)}
        set_from = [target for part in parts for target, value in _sets(part) if value and _has(value, found)]
        set_now = [one for target in set_from for one in ast.walk(target) if isinstance(one, ast.Name)]
        named = {one.id for one in set_now if isinstance(one.ctx, ast.Store)}
        found |= {part for part in parts if isinstance(part, ast.Name) and part.id in named}
    return found


def _sets(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """What a statement or a loop sets, and from what."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        return [(node.target, node.value)]
    return [(node.target, node.iter)] if isinstance(node, (ast.For, ast.comprehension)) else []


def _has(node: ast.AST, found: set[ast.AST]) -> bool:
    return any(part in found for part in ast.walk(node))


def _changes(name: str) -> bool:
    return name in _CHANGE or _is_in_place(name)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name != "requires_grad_"


def _root_of(node: ast.expr) -> str:
    """The name of what a chain of attributes, items and calls begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_of_metrics(node: ast.expr) -> bool:
    """Whether this is an item of what a Trainer logs, as ``trainer.callback_metrics["rate"]``."""
    held = node.value if isinstance(node, ast.Subscript) else None
    return isinstance(held, ast.Attribute) and held.attr.endswith("_metrics")


def names_in_transfers(owners: Mapping[str, Any], names: Iterable[str], *, used: bool = False) -> list[str]:
    """Of names of attributes, those that hooks of the transfer of batches to a device read, or only those they use.

    Args:
        owners: The module and the data module, by what names of their attributes begin with.
        names: The names.
        used: Whether those are left out that the hooks only count, or write down.
    """
    kinds = {
        prefix: [one for one in type(owner).__mro__ if is_users(one.__module__)] for prefix, owner in owners.items()
    }
    own = [prefix for prefix, of in kinds.items() if any(not _TRANSFERS.isdisjoint(vars(kind)) for kind in of)]
    read = {prefix: attributes_read(owners[prefix], _TRANSFERS) for prefix in own}
    found = []
    for name, prefix in ((name, prefix) for name in names for prefix in own if name.startswith(prefix)):
        leaf = _first_of(name[len(prefix) :])
        if leaf in read[prefix] and (not used or uses_of(owners[prefix], leaf, read=_TRANSFERS).uses):
            found.append(name)
    return found
