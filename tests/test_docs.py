"""What users read is true: the README's code, the docstrings' examples and the example programs run."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import random
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Modules whose docstrings have examples, and how many at least. Those of content tokens are with their test vectors.
MODULES = {"kvpager": 4, "kvpager.reference": 4, "kvpager.tiers.disk": 5}


def test_the_code_in_the_readme_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("package", ["kvpager", "kvpager.reference"])
@pytest.mark.filterwarnings("ignore:sequence .* was dropped:ResourceWarning")
def test_the_drawing_in_the_rules(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "design" / "rules.md").read_text(encoding="utf-8")
    ((program, drawing),) = re.findall(r"^```python\n(.*?)^```\n```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    exec(compile(program.replace("from kvpager import", f"from {package} import"), "rules.md", "exec"), {})
    assert capsys.readouterr().out == drawing


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted >= MODULES[name]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_core_uses_what_stands_before_it_only() -> None:
    """ARCHITECTURE's table of layers, held to the modules' own words. Their tests may use anything."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| [1-6] \| ([^|]*) \|", text, flags=re.MULTILINE)]
    order = [module for row in rows for module in row]
    source = ROOT / "rust" / "core" / "src"
    modules = {path.stem for path in source.iterdir()} - {"lib"}
    assert (len(rows), set(order)) == (6, modules)
    for module in order:
        files = [*source.glob(f"{module}.rs"), *source.glob(f"{module}/*.rs")]
        words = "".join(
            file.read_text(encoding="utf-8").partition("#[cfg(test)]")[0] for file in files if file.stem != "tests"
        )
        used = set(re.findall(r"\bcrate::(\w+)", words)) & modules - {module}
        assert used <= set(order[: order.index(module)]), f"{module} uses {used}"
        if module in rows[2]:
            assert not used & set(rows[2]), f"{module} knows {used & set(rows[2])}"


class TestServingLoop:
    """What people copy has to come to an end, whatever it is asked."""

    def serve(self, lengths: list[int]) -> None:
        example = runpy.run_path(str(ROOT / "examples" / "serving_loop.py"))
        slots = example["NUM_BLOCKS"] * example["BLOCK_SIZE"]
        assert slots == 96
        prompts = [[place % 7 + number for place in range(length)] for number, length in enumerate(lengths)]
        answers = example["serve"](prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == max(0, min(example["NEW_TOKENS"], slots - len(prompt)))
            assert answer == example["alone"](prompt)[: len(answer)]
        assert example["pager"].check() == []
        assert example["pager"].stats().active_blocks == 0

    @pytest.mark.usefixtures("watchdog")
    @pytest.mark.parametrize(
        "lengths",
        [
            [95],  # one token of answer fits, of 12
            [96],  # fills the pool: no answer fits
            [97],  # could never be admitted
            [60, 60],  # each fits, both do not
            [90, 90, 90],  # each outgrows the pool alone
            [40, 97, 50, 95, 3, 96, 84, 85],
        ],
    )
    def test_requests_that_outgrow_the_pool(self, lengths: list[int]) -> None:
        self.serve(lengths)

    @pytest.mark.usefixtures("watchdog")
    def test_many_mixes(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            self.serve([rng.randint(1, 100) for _ in range(rng.randint(1, 9))])
