"""`make sizes`: lines of code by folder, and the longest files. A report, not a rule: split by meaning, not to fit."""

import ast
from collections import defaultdict

from tests.tidy.source import Function, Source, python_files


def code_lines(source: Source) -> int:
    """Lines that hold something other than a comment or nothing."""
    return sum(1 for line in source.text.splitlines() if line.strip() and not line.strip().startswith("#"))


def longest_function(source: Source) -> tuple[int, str]:
    """The length in lines and the name of the file's longest function."""
    found = [(node.end_lineno or 0) - node.lineno + 1 for node in ast.walk(source.tree) if isinstance(node, Function)]
    names = [node.name for node in ast.walk(source.tree) if isinstance(node, Function)]
    return max(zip(found, names, strict=True), default=(0, ""))


def main() -> None:
    """Print the report."""
    folders: dict[str, list[int]] = defaultdict(list)
    sources = python_files("src", "tests", "scripts", "examples", "benchmarks")
    for source in sources:
        folders["/".join(source.path.split("/")[:-1])].append(code_lines(source))
    print(f"{'lines':>7} {'files':>6}  folder")
    for folder, counts in sorted(folders.items()):
        print(f"{sum(counts):>7} {len(counts):>6}  {folder}")
    print(f"\n{'lines':>7} {'longest function':>34}  the ten longest files of src")
    ours = [source for source in sources if source.path.startswith("src/")]
    for source in sorted(ours, key=code_lines, reverse=True)[:10]:
        length, name = longest_function(source)
        print(f"{code_lines(source):>7} {f'{name} {length}':>34}  {source.path}")


if __name__ == "__main__":
    main()
