"""The calls between the folders, or the files, of a crate."""

from .bodies import Calls
from .items import Workspace
from .types import Types


def sources(root):
    """The folders of the crates' sources in a tree."""
    return [root / "quic-core/src", root / "agent/src", *sorted(root.glob("agent/crates/*/src"))]


def calls_of(roots):
    """The calls of each crate that has its sources in one of `roots`, with that folder."""
    workspace = Workspace()
    crates = {root: workspace.add_crate(root) for root in roots}
    types = Types(workspace)
    functions = list(workspace.functions)
    for root, module in crates.items():
        calls = Calls(types, module.crate)
        calls.problems += workspace.problems if root == roots[0] else []
        calls.read(functions)
        yield root, calls


def between(calls, node_of, guesses=()):
    """For each node those that it calls into, with the functions that call and are called."""
    edges = {}
    known = ((caller, callee) for caller, callees in calls.edges.items() for callee in callees)
    for caller, callee in (*known, *guesses):
        node, other = node_of(caller.file), node_of(callee.file)
        if node and other:
            edges.setdefault(other, {})
            around = edges.setdefault(node, {})
            if node != other:
                around.setdefault(other, set()).add((str(caller), str(callee)))
    return edges


def folder_in(root):
    """The folder that a file lies in, as its path in `root`."""
    return lambda file: str(file.parent.relative_to(root)) if root in file.parents else None


def part_of(path, by_files):
    """The part of folder `path` that a file belongs to: a folder with all below it, or the files of `path` itself, as `.`."""
    flat = by_files or not any(file.is_dir() and any(file.rglob("*.rs")) for file in path.iterdir())

    def part(file):
        if path not in file.parents:
            return None
        parts = file.relative_to(path).parts
        return "/".join(parts) if flat else parts[0] if len(parts) > 1 else "."

    return part


def print_calls(path, cycles, by_files):
    """Prints which part of a folder calls which functions of which other."""
    root = next((folder for folder in (path, *path.parents) if folder.name == "src"), None)
    if root is None or not path.is_dir():
        print(f"{path}: not a folder below a crate's src")
        return 1
    tree = next((folder for folder in root.parents if (folder / "agent/crates").is_dir()), None)
    for found, calls in calls_of(sources(tree) if tree else [root]):
        if found == root:
            print_edges(between(calls, part_of(path, by_files)), cycles)
            print(share(calls))
    return 0


def print_edges(edges, cycles):
    circles = cycles(edges)
    circle_of = {node: number for number, circle in enumerate(circles, 1) for node in circle}
    for node in sorted(edges, key=lambda node: (circle_of.get(node, 0), node)):
        for other, pairs in sorted(edges[node].items()):
            called = {}
            for caller, callee in sorted(pairs):
                called.setdefault(callee, []).append(caller)
            line = f"{node} -> {other}: {len(pairs)} calls of {len(called)} functions"
            if node in circle_of and circle_of[node] == circle_of.get(other):
                line += f"; circle {circle_of[node]}"
            if node in edges[other]:
                line += f"; {len(edges[other][node])} calls back"
            print(line)
            for callee, callers in sorted(called.items(), key=lambda item: (-len(item[1]), item[0])):
                print(f"    {callee}  <-  {', '.join(callers)}")
    for number, circle in enumerate(circles, 1):
        print(f"circle {number}: {len(circle)} of {len(edges)}: {' '.join(circle)}")
    if not circles:
        print(f"no circle among {len(edges)}")


def share(calls):
    """How many of the calls are known, in words."""
    by_name, unknown = calls.counts["by name"], calls.counts["unknown"]
    known = calls.counts["own"] + by_name
    return (
        f"{known} calls of the workspace's functions, {by_name} of them known by the method's name alone;"
        f" {unknown} ({100 * unknown / max(1, known + unknown):.1f} %) not known to be of a type of the crate or not"
    )


def explain(root, cycles):
    """Prints the calls that are not known, and whether they could hide a circle."""
    for found, calls in calls_of(sources(root)):
        guesses = []
        print(f"{found.relative_to(root)}: {share(calls)}")
        for caller, callee in calls.guessed:
            print(f"    by its name: {caller}: {callee}")
        for caller, name, owners in calls.unknown:
            print(f"    not known: {caller}: .{name}() of {', '.join(owner.name for owner in owners) or 'a trait'}")
            guesses += [(caller, owner.methods[name][0]) for owner in owners if name in owner.methods]
        for problem in calls.problems:
            print(f"    not read: {problem}")
        known, most = (sum(map(len, cycles(between(calls, folder_in(found), more)))) for more in ((), guesses))
        if most != known:
            print(f"    {known} folders in circles; {most} if each call that is not known were of all types that have such a method")
    return 0
