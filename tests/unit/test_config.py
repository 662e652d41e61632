from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import ASGD, DropStale, GapAware, Quorum, SoftSync, StreamingDiLoCo
from lightning_asgd.core.algorithms.config import ExchangeConfig, Timeouts
from lightning_asgd.core.foundation.errors import ConfigurationError

NOT_POSITIVE_INTEGERS = [0, -1, 1.5, 10.0, True, False, "10", float("nan"), float("inf"), [10]]


def test_nsync_alone_gives_all_the_defaults() -> None:
    config = ExchangeConfig.create(nsync=7)
    assert (config.nfetch, config.npush) == (7, 7)
    assert (config.algorithm, config.overlap, config.max_offline_steps) == (ASGD("mean"), True, 1000)
    assert config.timeouts == Timeouts()


@pytest.mark.parametrize(
    ("settings", "auto"),
    [
        ({}, True),
        ({"algorithm": "asgd", "advanced": Advanced(overlap=False)}, True),
        ({"algorithm": ASGD("sum")}, True),
        ({"advanced": Advanced(nfetch=5)}, False),
        ({"advanced": Advanced(npush=5)}, False),
        ({"algorithm": "easgd"}, False),
        ({"algorithm": "diloco"}, False),
        ({"algorithm": ASGD(transforms=(SoftSync(2),))}, False),
    ],
)
def test_the_usual_period_is_auto_where_servers_apply_pushes_as_they_come(settings: dict[str, Any], auto: bool) -> None:
    config = ExchangeConfig.create(**settings)
    assert config.auto is auto
    assert {config.nfetch, config.npush} - {5} == {10}
    assert ASGDStrategy(**settings).settings["nsync"] == ("auto" if auto else config.npush)


def test_nfetch_and_npush_go_before_nsync() -> None:
    config = ExchangeConfig.create(nsync=7, advanced=Advanced(nfetch=2, npush=3))
    assert (config.nfetch, config.npush) == (2, 3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"nsync": "auto"}, True),
        ({"algorithm": ASGD(transforms=(DropStale(4),))}, True),
        ({"advanced": Advanced(nfetch=20)}, False),
        ({"compression": "bf16"}, False),
        ({"algorithm": ASGD(transforms=(SoftSync(2),))}, False),
        ({"algorithm": "downpour"}, True),
        ({"algorithm": "delayed_nesterov"}, True),
        ({"algorithm": ASGD(transforms=(GapAware(),))}, True),
        ({"algorithm": "easgd"}, False),
        ({"algorithm": "local_sgd"}, False),
        ({"algorithm": "diloco"}, False),
    ],
)
def test_servers_can_be_restored_where_workers_hold_their_weights(settings: dict[str, Any], expected: bool) -> None:
    assert ExchangeConfig.create(**{"nsync": 10, **settings}).restorable is expected


def test_other_settings_are_kept() -> None:
    timeouts = Timeouts(exchange_s=3)
    config = ExchangeConfig.create(
        nsync=1, algorithm=ASGD(0.5), advanced=Advanced(overlap=False, max_offline_steps=4), timeouts=timeouts
    )
    assert (config.algorithm, config.overlap, config.max_offline_steps) == (ASGD(0.5), False, 4)
    assert config.timeouts is timeouts


@pytest.mark.parametrize("value", NOT_POSITIVE_INTEGERS)
def test_wrong_nsync_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ExchangeConfig.create(nsync=value)
    check_text(caught.value, f"nsync={value!r}.", "Expected a whole number of at least 1", "such as nsync=10")


@pytest.mark.parametrize("value", ["Auto", "often", "10"])
def test_a_wrong_word_for_nsync_names_the_right_ones(value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ExchangeConfig.create(nsync=value)
    check_text(caught.value, f"nsync={value!r}.", "such as nsync=10, or 'auto' or 'restarted'.")


@pytest.mark.parametrize("name", ["nfetch", "npush", "max_offline_steps", "min_workers", "server_machines"])
@pytest.mark.parametrize("value", NOT_POSITIVE_INTEGERS)
def test_other_wrong_counts_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Advanced(**{name: value})
    check_text(caught.value, f"Advanced.{name}={value!r}.", "Expected a whole number of at least 1", f"such as {name}=")


def test_examples_of_counts_are_sensible() -> None:
    for call in (lambda: ASGDStrategy(num_servers=0), lambda: Advanced(min_workers=0)):
        with pytest.raises(ConfigurationError, match=r"of at least 1, such as (num_servers|min_workers)=2\.$"):
            call()
    with pytest.raises(ConfigurationError, match=r"at least 1, such as nfetch=10\.$"):
        Advanced(nfetch=0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"snapshot_every_s": 0}, "Advanced.snapshot_every_s=0. Expected a number of seconds above 0"),
        ({"offload": "x"}, "Advanced.offload='x'. Expected True or False."),
        ({"gain": 1}, "Advanced.gain=1. Expected True or False."),
        ({"units": "words"}, "Advanced.units='words'. Expected 'samples', 'tokens', a function"),
    ],
)
def test_other_wrong_fields_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(text)}"):
        Advanced(**given)


@pytest.mark.parametrize("value", [True, {"gain": False}, Timeouts()])
def test_wrong_advanced_settings_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ExchangeConfig.create(nsync=10, advanced=value)
    check_text(caught.value, f"advanced={value!r}.", "Expected a lightning_asgd.Advanced(...)")


def test_settings_show_what_differs_from_the_defaults() -> None:
    assert repr(Advanced()) == "Advanced()"
    assert repr(Advanced(nfetch=2, gain=False)) == "Advanced(nfetch=2, gain=False)"
    assert repr(Timeouts(silence_s=30)) == "Timeouts(silence_s=30)"


@pytest.mark.parametrize("settings", [Advanced(nfetch=2, units="tokens"), Timeouts(start_s=3)])
def test_settings_can_be_copied(settings: Any) -> None:
    for other in (pickle.loads(pickle.dumps(settings)), copy.deepcopy(settings)):
        assert other == settings


def test_the_config_holds_every_field_and_what_follows_from_it() -> None:
    given = Advanced(npush=3, units="samples", min_workers=2, gain=True)
    config = ExchangeConfig.create(nsync=7, algorithm="local_sgd", advanced=given)
    assert (config.nfetch, config.npush, config.overlap, config.gain) == (7, 3, False, False)
    assert (config.units, config.min_workers, config.server_machines) == ("samples", 2, 1)


@pytest.mark.parametrize("value", ["average", "", "Mean", True, 0, 0.0, -0.5, float("nan"), float("inf"), [1]])
def test_wrong_scale_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ExchangeConfig.create(nsync=10, algorithm=ASGD(value))
    check_text(caught.value, f"scale={value!r}", "Expected 'mean', 'sum' or a positive number", "Use 'mean'")


@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_wrong_overlap_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Advanced(overlap=value)
    check_text(
        caught.value,
        f"Advanced.overlap={value!r}.",
        "Expected True to train during an exchange, False to wait for it.",
    )


@pytest.mark.parametrize("value", [30, {"exchange_s": 30}, "30"])
def test_wrong_timeouts_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ExchangeConfig.create(nsync=10, timeouts=value)
    check_text(caught.value, f"timeouts={value!r}.", "Expected a lightning_asgd.Timeouts(...)")


@pytest.mark.parametrize("name", [f.name for f in fields(Timeouts)])
@pytest.mark.parametrize("value", [0, -1, 0.0, "10", None, True, float("nan")])
def test_wrong_timeout_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Timeouts(**{name: value})
    check_text(caught.value, f"Timeouts.{name}={value!r}.", "Expected a number of seconds above 0")


@pytest.mark.parametrize("name", [f.name for f in fields(Timeouts)])
@pytest.mark.parametrize("value", [float("inf"), 1e300])
def test_a_timeout_that_no_clock_can_wait_for_is_refused(name: str, value: float) -> None:
    # threading and datetime.timedelta raise OverflowError for these, in the middle of a run.
    with pytest.raises(ConfigurationError):
        Timeouts(**{name: value})


@pytest.mark.parametrize("value", [1, 0.001, 86400.0])
def test_timeouts_are_any_number_of_seconds(value: float) -> None:
    assert Timeouts(start_s=value, exchange_s=value, collective_s=value).start_s == value


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Timeouts().start_s = 1.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        ExchangeConfig.create(nsync=1).npush = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Advanced().gain = False  # type: ignore[misc]


def check_text(error: Exception, *parts: str) -> None:
    assert re.search(".*".join(re.escape(part) for part in parts), str(error)), str(error)


@pytest.mark.parametrize("algorithm", ["downpour", "layerwise"])
def test_offload_is_refused_where_sums_of_gradients_stay_on_the_device(algorithm: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^Advanced\.offload=True was given with "):
        ExchangeConfig.create(nsync=1, algorithm=algorithm, advanced=Advanced(offload=True))


def test_a_reply_that_is_merged_later_is_refused_where_workers_wait_for_it() -> None:
    rule = StreamingDiLoCo(delay=3)
    with pytest.raises(ConfigurationError, match=r"^Advanced.overlap=False was given with StreamingDiLoCo.*delay=3"):
        ExchangeConfig.create(nsync=10, algorithm=rule, advanced=Advanced(overlap=False))
    assert ExchangeConfig.create(nsync=10, algorithm=rule).overlap
    assert not ExchangeConfig.create(nsync=10, algorithm=StreamingDiLoCo(), advanced=Advanced(overlap=False)).overlap


def test_workers_that_train_on_while_a_round_lasts_neither_wait_nor_measure_it() -> None:
    for settings, expected in (
        ({"nsync": "auto"}, "nsync='auto'"),
        ({"nsync": 10, "advanced": Advanced(overlap=False)}, "overlap=False"),
    ):
        for rule in ("decoupled_diloco", ASGD(transforms=[Quorum()])):
            with pytest.raises(ConfigurationError, match=f"{expected} was given with .*Expected"):
                ExchangeConfig.create(algorithm=rule, **settings)
    assert ExchangeConfig.create(nsync=10, algorithm="decoupled_diloco").overlap
