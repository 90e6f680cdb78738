"""Layers: which value wins, what is remembered about it, and how everything wrong is said at once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.declared import Declared
from palestra.errors import ConfigError
from palestra.fields import leaves, toml_text
from palestra.job import Job
from palestra.settings import Origin, Resolved, resolve, resolve_values


class GuessNumber(Declared):
    pass


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(**values: Any) -> Job:
    return Job(**{"model": "./m", "environment": GuessNumber(), **values})


def laid(
    built: Job | None = None,
    *,
    toml: str | None = None,
    environ: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
) -> Resolved:
    files: list[Path] = []
    if toml is not None:
        files = [Path("settings.toml")]
        files[0].write_text(toml)
    return resolve(built or job(), files=files, environ=environ or {}, sets=sets)


def problems(**layers: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        laid(layers.pop("built", None), **layers)
    return caught.value.problems


def one_problem(**layers: Any) -> str:
    (problem,) = problems(**layers)
    return problem


# --- precedence and provenance ----------------------------------------------------------------------


def test_each_layer_wins_over_the_ones_below_it() -> None:
    built = job(steps=2)
    toml, environ, sets = "steps = 3\n", {"PALESTRA_STEPS": "4"}, ["steps=5"]
    assert laid(job()).job.steps == 20
    assert laid(built).job.steps == 2
    assert laid(built, toml=toml).job.steps == 3
    assert laid(built, toml=toml, environ=environ).job.steps == 4
    assert laid(built, toml=toml, environ=environ, sets=sets).job.steps == 5


def test_the_winner_and_everything_it_overrode_are_remembered_in_order() -> None:
    found = laid(
        job(steps=2), toml="\n\nsteps = 3", environ={"PALESTRA_STEPS": "4"}, sets=["steps=5", "steps=6"]
    )
    origin = found.provenance["steps"]
    assert (origin.source, origin.detail, origin.value) == ("--set", "--set steps=6", 6)
    lower = [(o.source, o.detail, o.value) for o in origin.overridden]
    assert lower[:3] == [
        ("--set", "--set steps=5", 5),
        ("environment", "PALESTRA_STEPS", 4),
        ("file", "settings.toml:3", 3),
    ]
    assert lower[3][0] == "job file"
    assert "test_layers.py:" in lower[3][1]
    assert lower[3][2] == 2
    assert len(lower) == 4


def test_a_setting_nobody_gave_comes_from_its_default() -> None:
    assert laid().provenance["optimizer.beta2"] == Origin("default", "", 0.95)


def test_every_setting_has_a_value_and_an_origin() -> None:
    found = laid()
    assert list(found.values) == list(found.provenance) == list(leaves(Job))
    assert all(found.provenance[key].value == value for key, value in found.values.items())


def test_two_files_are_two_layers_and_the_later_wins() -> None:
    Path("a.toml").write_text("steps = 3\nseed = 1")
    Path("b.toml").write_text("steps = 4")
    found = resolve(job(), files=[Path("a.toml"), Path("b.toml")], environ={})
    assert (found.job.steps, found.job.seed) == (4, 1)
    assert [o.detail for o in found.provenance["steps"].overridden] == ["a.toml:1"]


def test_the_file_in_the_working_directory_is_found_by_itself() -> None:
    assert resolve(job(), environ={}).job.steps == 20
    Path("palestra.toml").write_text("steps = 3")
    assert resolve(job(), environ={}).job.steps == 3
    assert resolve(job(), files=(), environ={}).job.steps == 20


def test_the_process_environment_is_used_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_OPTIMIZER__LEARNING_RATE", "3e-5")
    assert resolve(job()).job.optimizer.learning_rate == 3e-5


def test_flags_short_for_a_setting_are_remembered_as_they_were_typed() -> None:
    found = laid(sets=["--steps=7", "--runs-dir=out"])
    assert found.provenance["steps"].detail == "--steps=7"
    assert (found.job.steps, found.job.runs_dir) == (7, Path("out"))


def test_values_in_sections_are_layered_one_by_one() -> None:
    found = laid(
        job(optimizer={"learning_rate": 1e-4, "beta1": 0.8}),
        toml="[optimizer]\nlearning_rate = 2e-4\n",
        environ={"PALESTRA_OPTIMIZER__WEIGHT_DECAY": "0.1"},
        sets=["sampling.stop=['```', 'END']"],
    )
    assert found.job.optimizer.learning_rate == 2e-4
    assert found.job.optimizer.beta1 == 0.8
    assert found.job.optimizer.weight_decay == 0.1
    assert found.job.sampling.stop == ("```", "END")


def test_what_was_set_stays_distinguishable_from_defaults_after_resolving() -> None:
    found = laid(job(seed=0), sets=["steps=20"])
    assert {"seed", "steps"} <= found.job.model_fields_set
    assert "threads" not in found.job.model_fields_set
    assert found.provenance["seed"].source == "job file"


def test_the_environment_object_is_the_users_own() -> None:
    built = job()
    assert laid(built, sets=["steps=3"]).job.environment is built.environment


def test_resolving_twice_changes_nothing() -> None:
    once = laid(job(steps=3), sets=["optimizer.beta1=0.5"])
    twice = laid(once.job)
    assert twice.job == once.job
    assert dict(twice.values) == dict(once.values)


# --- the run's name ---------------------------------------------------------------------------------


def test_an_unnamed_run_takes_the_name_of_the_job_file() -> None:
    assert resolve(job(), environ={}, job_file=Path("/x/my_job.py")).job.name == "my_job"


def test_an_unnamed_run_takes_the_name_of_the_file_that_built_the_job() -> None:
    assert resolve(job(), environ={}).job.name == "test_layers"


def test_a_job_built_without_a_file_takes_the_name_of_its_environment() -> None:
    names: dict[str, Any] = {"Job": Job, "GuessNumber": GuessNumber}
    exec(compile("job = Job(model='m', environment=GuessNumber())", "<stdin>", "exec"), names)
    assert resolve(names["job"], environ={}).job.name == "guess_number"


def test_a_given_name_is_kept() -> None:
    assert laid(job(name="mine")).job.name == "mine"
    assert laid(job(name="mine"), sets=["name=other"]).job.name == "other"


# --- TOML files and their lines ---------------------------------------------------------------------

TRICKY = """\
# a comment with steps = 99
name = "a"   # trailing

[sampling]
stop = [
  "one",  # a ] in a comment
  "two = 2",
]
temperature = 0.5
[optimizer]
"learning_rate" = 1e-4
beta1=0.5
[ evaluation ]
greedy = false

[sandbox] # last
time_s = 3
"""


def test_every_value_of_a_file_is_traced_to_its_line() -> None:
    found = laid(toml=TRICKY)
    lines = {key: o.detail for key, o in found.provenance.items() if o.source == "file"}
    assert lines == {
        "name": "settings.toml:2",
        "sampling.stop": "settings.toml:5",
        "sampling.temperature": "settings.toml:9",
        "optimizer.learning_rate": "settings.toml:11",
        "optimizer.beta1": "settings.toml:12",
        "evaluation.greedy": "settings.toml:14",
        "sandbox.time_s": "settings.toml:17",
    }
    assert found.job.sampling.stop == ("one", "two = 2")


def test_dotted_keys_inline_tables_and_windows_line_ends_are_understood() -> None:
    found = laid(toml="optimizer.beta1 = 0.5\r\nsampling = {top_k = 3, temperature = 0.7}\r\n")
    assert found.job.sampling.top_k == 3
    assert found.provenance["sampling.temperature"].detail == "settings.toml:2"


def test_a_multi_line_string_does_not_shift_the_lines_below_it() -> None:
    found = laid(toml='model = """\\\n   ./m\n   """\nsteps = 3\n')
    assert found.provenance["steps"].detail == "settings.toml:4"


def test_a_file_with_a_byte_order_mark_is_read() -> None:
    Path("bom.toml").write_bytes("\ufeffsteps = 3".encode())
    assert resolve(job(), files=[Path("bom.toml")], environ={}).job.steps == 3


KEYS = [
    k for k, leaf in leaves(Job).items() if leaf.settable and leaf.kind in ("int", "float", "bool", "strings")
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(KEYS), unique=True, min_size=1), st.integers(0, 3))
def test_any_file_of_valid_settings_is_traced_line_by_line(keys: list[str], blank: int) -> None:
    defaults = {key: leaf.default for key, leaf in leaves(Job).items()}
    top = [key for key in keys if "." not in key]
    below = sorted((key for key in keys if "." in key), key=lambda key: key.partition(".")[0])
    rows, where, section = ["# settings"], dict[str, int](), ""
    for key in [*top, *below]:
        group, _, name = key.rpartition(".")
        if group != section:
            rows += [""] * blank + [f"[{group}]"]
            section = group
        rows.append(f"{name} = {toml_text(defaults[key])}")
        where[key] = len(rows)
    found = laid(toml="\n".join(rows))
    traced = {k: o.detail for k, o in found.provenance.items() if o.source == "file"}
    assert traced == {key: f"settings.toml:{line}" for key, line in where.items()}


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"sets": ["steps=ten"]},
         'steps: expected a whole number >= 1, got "ten" from --set steps=ten; default: 20'),
        ({"sets": ["--steps=ten"]},
         'steps: expected a whole number >= 1, got "ten" from --steps=ten; default: 20'),
        ({"environ": {"PALESTRA_STEPS": "0"}},
         "steps: expected a whole number >= 1, got 0 from PALESTRA_STEPS; nearest: 1"),
        ({"toml": "steps = true"},
         "steps: expected a whole number >= 1, got true from settings.toml:1; default: 20"),
        ({"sets": ["stpes=3"]}, "stpes: no such setting (from --set stpes=3); nearest: steps"),
        ({"environ": {"PALESTRA_OPTIMIZER_LEARNING_RATE": "1"}},
         "PALESTRA_OPTIMIZER_LEARNING_RATE: no such setting; nearest: PALESTRA_OPTIMIZER__LEARNING_RATE"),
        ({"environ": {"PALESTRA_QQQ": "1"}}, "PALESTRA_QQQ: no such setting"),
        ({"sets": ["steps"]}, "--set steps: expected KEY=VALUE, for example --set steps=..."),
        ({"sets": ["=3"]}, "--set =3: expected KEY=VALUE, for example --set optimizer.learning_rate=..."),
        ({"sets": [""]}, "--set : expected KEY=VALUE, for example --set optimizer.learning_rate=..."),
        ({"sets": ["environment=x"]},
         "environment: only Python can give it, in Job(environment=...) (from --set environment=x)"),
        ({"environ": {"PALESTRA_ENVIRONMENT": "x"}},
         "environment: only Python can give it, in Job(environment=...) (from PALESTRA_ENVIRONMENT)"),
        ({"sets": ["environment.x=1"]},
         "environment.x: only Python can give it, in Job(environment=...) (from --set environment.x=1)"),
        ({"sets": ["checkpoints=3"]},
         "checkpoints: is a section, got \"3\" from --set checkpoints=3; its settings: every_steps, keep"),
        ({"toml": "steps.x = 1"},
         "steps.x: steps is one value and has no parts (from settings.toml:1); nearest: steps"),
        ({"sets": ["algorithm.truncated=cut"]},
         'algorithm.truncated: expected one of count, mask, penalize, got "cut" '
         'from --set algorithm.truncated=cut; nearest: count'),
        ({"sets": ["algorithm.loss=gsp"]},
         'algorithm.loss "gsp": expected one of ppo, gspo, rloo, cispo, sapo; nearest: gspo '
         "(algorithm.loss from --set algorithm.loss=gsp)"),
        ({"toml": "[limits]\nmax_starved_steps = 1979-05-27"},
         "limits.max_starved_steps: expected a whole number >= 1, got datetime.date(1979, 5, 27) "
         "from settings.toml:2; default: 5"),
    ],
)  # fmt: skip
def test_a_refusal_reads_as_a_user_would_want_it(layers: dict[str, Any], said: str) -> None:
    assert one_problem(**layers) == said


def test_an_unknown_section_is_refused_even_when_it_is_empty() -> None:
    assert (
        one_problem(toml="[optimiser]\n")
        == "optimiser: no such setting (from settings.toml:1); nearest: optimizer"
    )
    assert laid(toml="[optimizer]\n").job.optimizer.beta1 == 0.9


def test_a_list_of_tables_is_not_a_section() -> None:
    assert "optimizer: is a section" in problems(toml="[[optimizer]]\nbeta1 = 0.5")[0]


def test_a_group_of_one_is_refused_from_every_layer() -> None:
    """training-gym tutorial 002 (case 30)."""
    for layers in (
        {"toml": "algorithm.group_size = 1"},
        {"environ": {"PALESTRA_ALGORITHM__GROUP_SIZE": "1"}},
        {"sets": ["algorithm.group_size=1"]},
    ):
        problem = one_problem(**layers)
        assert "every advantage would be 0" in problem
        assert "nearest: group_size 2" in problem


def test_all_layers_report_their_problems_together() -> None:
    found = problems(
        toml="stepz = 1\n[sampling]\ntop_p = 2\n",
        environ={"PALESTRA_SEED": "x", "PALESTRA_LR": "1", "UNRELATED": "1"},
        sets=["a", "engine.dtype=fp16", "optimizer.warmup_steps=99"],
    )
    assert len(found) == 7
    assert "nearest: PALESTRA_OPTIMIZER__LEARNING_RATE" in "\n".join(found)


def test_a_wrong_value_is_refused_even_where_a_higher_layer_overrides_it() -> None:
    assert "settings.toml:1" in one_problem(toml="steps = 0", sets=["steps=5"])


def test_a_conflict_between_layers_names_where_each_value_comes_from() -> None:
    problem = one_problem(built=job(optimizer={"warmup_steps": 10}), sets=["steps=5"])
    assert "optimizer.warmup_steps (10) is above steps (5)" in problem
    assert "steps from --set steps=5" in problem
    assert "test_layers.py:" in problem


def test_a_conflict_can_be_mended_by_a_higher_layer() -> None:
    assert laid(job(optimizer={"warmup_steps": 50}), sets=["steps=100"]).job.steps == 100


def test_the_message_lists_all_problems_and_one_next_command() -> None:
    with pytest.raises(ConfigError) as caught:
        laid(sets=["a=1", "steps=0"])
    text = str(caught.value)
    assert text.startswith("the job's configuration has 2 errors:\n  - ")
    assert text.endswith("next: palestra config schema")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps = \n", "not valid TOML"),
        (b"a = 1\nb = \n", "at line 2"),
        (b"steps = 1\nsteps = 2\n", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_understood_is_named_with_the_line(content: bytes, said: str) -> None:
    Path("bad.toml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve(job(), files=[Path("bad.toml")], environ={}, sets=["steps=ten"])
    first, second = caught.value.problems
    assert "configuration file bad.toml" in first
    assert said in first
    assert "--set steps=ten" in second


def test_a_missing_or_unreadable_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml cannot be read: No such file"):
        resolve(job(), files=[Path("gone.toml")], environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resolve(job(), files=[Path(".")], environ={})


def test_our_other_variables_are_not_settings() -> None:
    assert laid(environ={"PALESTRA_DEBUG": "1", "PALESTRA_CACHE": "/x", "PALESTRA": "1"}).job.steps == 20


@given(
    st.lists(
        st.text(max_size=20)
        | st.builds("{}={}".format, st.sampled_from(sorted(leaves(Job))), st.text(max_size=20)),
        max_size=4,
    )
)
def test_whatever_is_set_either_a_job_comes_out_or_one_configuration_error(sets: list[str]) -> None:
    try:
        found = resolve(job(), files=(), environ={}, sets=sets)
    except ConfigError as error:
        refused = error.problems
    else:
        refused = ()
        for text in sets:
            assert text.partition("=")[0].strip().removeprefix("--").replace("-", "_") in found.values
    assert all(problem and "pydantic" not in problem for problem in refused)


@given(st.sampled_from(["a", "steps", "optimizer.beta1"]), st.text(alphabet="abc=. 1", max_size=8))
def test_the_first_equals_sign_splits_key_and_value(key: str, value: str) -> None:
    found = resolve(job(), files=(), environ={}, sets=[f"model={key}={value}"])
    assert found.job.model == f"{key}={value}"


# --- as data ----------------------------------------------------------------------------------------


def test_the_values_are_json_and_hold_no_object_of_ours() -> None:
    found = laid(job(steps=3), sets=["sampling.stop=['a']"])
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["steps"] == 3
    assert plain["sampling"]["stop"] == ["a"]
    assert plain["environment"] == "GuessNumber"
    assert plain["runs_dir"] == "runs"


def test_provenance_is_json_with_the_overridden_layers() -> None:
    found = json.loads(json.dumps(laid(toml="steps = 3", sets=["steps=4"]).provenance_json()))
    assert found["steps"] == {
        "source": "--set",
        "detail": "--set steps=4",
        "value": 4,
        "overridden": [{"source": "file", "detail": "settings.toml:1", "value": 3, "overridden": []}],
    }


def test_layers_without_a_job_give_what_they_say_by_themselves() -> None:
    found = resolve_values(files=(), environ={}, sets=["steps=3"])
    assert found.values["steps"] == 3
    assert "model" not in found.values
    assert tomllib.loads(f"v = {toml_text(found.values['optimizer.epsilon'])}")["v"] == 1e-8


# --- what a wrong name most likely meant --------------------------------------------------------------


def test_a_wrong_section_is_one_problem_whatever_it_holds() -> None:
    said = one_problem(toml="[trainr]\nmicro_batch_tokens = 1\ndtype = 'fp32'\n")
    assert said.startswith("trainr: no such setting (from settings.toml:1); nearest: trainer")
    both = problems(toml="[trainr]\ndtype = 'fp32'\n[trainer]\ndtyp = 'fp32'\n")
    assert len(both) == 2, "another section's mistakes are still said"


def test_a_reward_in_a_file_points_at_the_environment() -> None:
    said = one_problem(toml="reward = 3\n")
    assert said.endswith("nearest: environment")


def test_a_setting_without_its_section_is_found_by_its_own_name() -> None:
    assert one_problem(toml="episode_seconds = 3\n").endswith("nearest: deadlines.episode_s")
    assert one_problem(toml="stepz = 3\n").endswith("nearest: steps")


def test_every_variable_of_ours_that_is_read_elsewhere_is_no_unknown_setting() -> None:
    """Whoever has set one for another command must still be able to train."""
    import re
    from pathlib import Path

    import palestra
    from palestra.settings import NOT_SETTINGS

    source = Path(palestra.__file__).parent
    read = set()
    for path in source.rglob("*.py"):
        read |= set(re.findall(r'environ\.get\(\s*"(PALESTRA_[A-Z_]+)"', path.read_text()))
    assert read - {"PALESTRA_RUNS_DIR"} <= NOT_SETTINGS
    assert {"PALESTRA_VLLM_PYTHON", "PALESTRA_TOKEN"} <= read
