"""Whether a chat template takes a message's content as one string or as a list of parts.

It takes parts if it loops over the content of a message. Found in the template's syntax tree by the same rules as in
vLLM 0.32 (renderers/hf.py, Apache-2.0), because the engine decides by them what the template is given.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(tree: nodes.Template) -> bool:
    """Whether any loop of a template goes over content."""
    messages = list(message_names(tree))
    macros = {loop: macro for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    given = {macro: content_parameters(tree, macro, messages) for macro in tree.find_all(nodes.Macro)}
    for loop in tree.find_all(nodes.For):
        if any(reaches(loop.iter, name, "content") for name in messages):
            return True
        if isinstance(loop.iter, nodes.Name):
            macro = macros.get(loop)
            if loop.iter.name in given[macro] if macro is not None else loop.iter.name == "content":
                return True
    return False


def reaches(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is this variable, or its attribute or item `key`, perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return reaches(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return reaches(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return reaches_plainly(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and reaches_plainly(node.node, name) and node.attr == key


def reaches_plainly(node: nodes.Node, name: str) -> bool:
    """Whether an expression is this variable and nothing else."""
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def list_names(tree: nodes.Template) -> Iterator[str]:
    """`messages` and the variables that it is assigned to."""
    names = ["messages"]
    yield "messages"
    for name in names:
        for assignment in tree.find_all(nodes.Assign):
            target = assignment.target
            if reaches(assignment.node, name) and isinstance(target, nodes.Name) and target.name not in names:
                names.append(target.name)
                yield target.name


def message_names(tree: nodes.Template) -> Iterator[str]:
    """The variables that loops over messages give each of them."""
    lists = list(list_names(tree))
    for loop in tree.find_all(nodes.For):
        if any(reaches(loop.iter, name) for name in lists) and isinstance(loop.target, nodes.Name):
            yield loop.target.name


def content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """The parameters of a macro that are given a message's content anywhere."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((it.key, it.value) for it in call.kwargs if it.key in names)]
        found.update(name for name, value in given if any(reaches(value, it, "content") for it in messages))
    return found
