"""`Pager.metrics()`, read by the parser of Prometheus' own client."""

from __future__ import annotations

import math

import pytest

import kvpager
import kvpager.reference
from kvpager.metrics import METRICS, family

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")


def read(text):
    """Each sample by name and labels; every family has a type and a help."""
    families = list(parser.text_string_to_metric_families(text))
    assert len({each.name for each in families}) == len(families)
    for each in families:
        assert each.documentation
        assert each.type in ("gauge", "counter")
    return {(sample.name, *sorted(sample.labels.items())): sample.value for each in families for sample in each.samples}


@pytest.mark.parametrize("implementation", [kvpager.Pager, kvpager.reference.Pager])
def test_the_text_says_what_the_statistics_say(implementation):
    pager = implementation(8, 4, num_host_blocks=4)
    with pager.admit([1, 2, 3, 4, 5]) as sequence:
        sequence.commit()
        text = pager.metrics()
        found = read(text)
    assert found["kvpager_kv_cache_usage_perc",] == 0.25
    assert found["kvpager_num_requests_running",] == 1
    assert found["kvpager_computed_tokens_total",] == found["kvpager_prefix_cache_queries_total",] == 5
    assert found["kvpager_blocks", ("state", "active"), ("tier", "device")] == 2
    assert found["kvpager_blocks", ("state", "free"), ("tier", "host")] == 4
    assert found["kvpager_cache_config_info", ("block_size", "4"), ("num_gpu_blocks", "8")] == 1
    assert {f"kvpager_{metric.name}" for metric in METRICS} <= {name for name, *_ in found}
    assert read(pager.metrics())["kvpager_request_success_total",] == 1


def test_a_reading_comes_along():
    pager = kvpager.Pager(8, 4)
    found = read(pager.metrics(kvpager.Pressure(pager).read()))
    assert [found["kvpager_pressure_state", ("state", state)] for state in ("ok", "pressure", "thrashing")] == [1, 0, 0]
    assert found["kvpager_pressure_score",] == found["kvpager_recompute_tax",] == 0
    assert found["kvpager_concurrency_advice",] >= 1


def test_labels_survive_whatever_is_in_them():
    pager = kvpager.Pager(8, 4)
    name = 'a "quoted" back\\slash,\nand {braces} \u00fc'
    found = read(pager.metrics(labels={"model_name": name}))
    assert found["kvpager_num_requests_running", ("model_name", name)] == 0
    assert found["kvpager_blocks", ("model_name", name), ("state", "free"), ("tier", "device")] == 8


@pytest.mark.parametrize("bad", ["", "7up", "a-b", "__mine", "ü"])
def test_names_that_prometheus_refuses_are_refused(bad):
    pager = kvpager.Pager(8, 4)
    with pytest.raises(ValueError, match="label"):
        pager.metrics(labels={bad: "x"})
    if bad != "__mine":
        with pytest.raises(ValueError, match="metric"):
            family(bad, "gauge", "", [({}, 1)])


@pytest.mark.parametrize("implementation", [kvpager.Pager, kvpager.reference.Pager])
def test_what_is_no_reading_and_no_mapping_is_refused(implementation):
    pager = implementation(8, 4)
    for wrong in (pager.stats(), kvpager.Pressure(pager), "ok"):
        with pytest.raises(TypeError, match=rf"reading must be a Reading, .*, not {type(wrong).__name__}"):
            pager.metrics(wrong)
    for wrong in (["model_name"], "x"):
        with pytest.raises(TypeError, match=rf"labels must be a mapping .*, not {type(wrong).__name__}"):
            pager.metrics(labels=wrong)


def test_every_number_has_a_form():
    text = family("x", "gauge", "back\\slash\nline", [({"n": str(n)}, n) for n in (0.1, 1e300, math.inf, -math.inf, 7)])
    found = read(text)
    assert sorted(found.values()) == [-math.inf, 0.1, 7, 1e300, math.inf]
    assert math.isnan(read(family("x", "gauge", "h", [({}, math.nan)]))["x",])


def test_asking_changes_nothing():
    pager = kvpager.Pager(8, 4)
    before = pager.dump(full=True), pager.stats()
    pager.metrics()
    assert (pager.dump(full=True), pager.stats()) == before
