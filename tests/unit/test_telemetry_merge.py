"""One scrape of several processes: each sample keeps its value and gets its process, each metric stays together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from baton.telemetry import Metrics, Reading, catalogue
from baton.telemetry.merge import merge_scrapes

# The library has no types for this one.
parse_openmetrics = cast("Callable[[str], Iterable[Metric]]", openmetrics.text_string_to_metric_families)  # pyright: ignore[reportUnknownMemberType]
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def rendered(accept: str, answers: int, *, model: str = 'a {"model"}, # odd') -> str:
    metrics = Metrics("gateway")
    metrics.read(lambda: [Reading(catalogue.ANSWERS, answers, ("stop",)), Reading(catalogue.ANSWERS_RUNNING, answers)])
    metrics.observe(catalogue.TIME_TO_FIRST_TOKEN, 0.3, "chat", "baton", model, trace=TRACE)
    return metrics.render(accept)[1].decode()


def test_every_sample_keeps_its_value_and_gets_its_process() -> None:
    for accept, parse in (("*/*", parse_plain), ("application/openmetrics-text", parse_openmetrics)):
        texts = {"0": rendered(accept, 3), "1": rendered(accept, 5)}
        # Processor time and the like differ from scrape to scrape, but not within these texts.
        alone = {process: list(parse(text)) for process, text in texts.items()}
        expected = {
            (sample.name, tuple(sorted({**sample.labels, "process": process}.items()))): (sample.value, sample.exemplar)
            for process, families in alone.items()
            for family in families
            for sample in family.samples
        }
        merged = list(parse(merge_scrapes(texts, openmetrics=parse is parse_openmetrics)))
        seen = {
            (sample.name, tuple(sorted(sample.labels.items()))): (sample.value, sample.exemplar)
            for family in merged
            for sample in family.samples
        }
        assert seen == expected
        assert [family.name for family in merged] == [family.name for family in alone["0"]], "each metric comes once"
        assert [family.type for family in merged] == [family.type for family in alone["0"]]


def test_metrics_that_only_one_process_has_are_kept() -> None:
    first = "# HELP a x\n# TYPE a gauge\na 1\n"
    second = '# HELP b y\n# TYPE b gauge\nb{l="v"} 2\n'
    assert merge_scrapes({"0": first, "1": second}, openmetrics=False) == (
        '# HELP a x\n# TYPE a gauge\na{process="0"} 1\n# HELP b y\n# TYPE b gauge\nb{process="1",l="v"} 2\n'
    )


def test_without_any_process_there_is_nothing() -> None:
    assert merge_scrapes({}, openmetrics=False) == ""


def test_without_any_process_openmetrics_still_ends() -> None:
    assert merge_scrapes({}, openmetrics=True) == "# EOF\n"


def test_a_label_may_contain_what_only_python_calls_the_end_of_a_line() -> None:
    model = "a\u2028b\x85c\rd\x0be"
    text = rendered("*/*", 3, model=model)
    assert f'model="{model}"' in text
    merged = merge_scrapes({"0": text}, openmetrics=False)
    assert len(merged.split("\n")) == len(text.split("\n"))
    assert f'model="{model}"' in merged
