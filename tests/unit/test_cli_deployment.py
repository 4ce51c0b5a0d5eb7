"""The programs that `baton up` starts, and the checks of its options."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli import servers
from baton.cli.deployment import check_deployment, find_model, resolve, worker_programs
from baton.cli.engine_defaults import context_limit, engine_defaults, worker_threads
from baton.cli.main import main, parse_pool_bytes, run
from baton.cli.servers import free_port
from baton.errors import ConfigurationError, InvalidRequest
from baton.messages.placement import Disaggregation
from baton.processes.child import describe_exit
from baton.stop import EXIT_FAILED, EXIT_MISCONFIGURED
from tests.harness.deployments import NATS_URL, REDIS_URL, all_programs, flags, make_deployment


def test_one_program_per_process_prefill_before_decode(tmp_path: Path) -> None:
    names = [
        program.name for program in all_programs(make_deployment(tmp_path, prefill=2, decode=1, engine="simulated"))
    ]
    assert names == ["kvindex", "scheduler", "gateway", "prefill-0", "prefill-1", "decode-0"]


def test_the_gateway_may_have_several_processes(tmp_path: Path) -> None:
    for number, engine in ((1, "simulated"), (3, "simulated")):
        deployment = make_deployment(tmp_path, gateway_processes=number, engine=engine, port=free_port())
        check_deployment(deployment)
        assert flags(all_programs(deployment)[2])["--processes"] == str(number)
    for number in (0, -1, 65):
        with pytest.raises(ConfigurationError, match=f"GATEWAY_PROCESSES={number} is not possible"):
            check_deployment(make_deployment(tmp_path, gateway_processes=number, engine="simulated"))


def test_running_streams_get_the_wanted_time_to_end(tmp_path: Path) -> None:
    for drain_s in (0, 60):
        deployment = make_deployment(tmp_path, drain_s=drain_s, engine="simulated", port=free_port())
        check_deployment(deployment)
        gateway = all_programs(deployment)[2]
        assert flags(gateway)["--drain-s"] == str(drain_s)
        assert gateway.stop_timeout_s > drain_s, "the gateway cuts its streams, and not a kill"
    for drain_s in (-1, 3601):
        with pytest.raises(ConfigurationError, match=f"DRAIN_S={drain_s} is not possible"):
            check_deployment(make_deployment(tmp_path, drain_s=drain_s, engine="simulated"))


def test_the_gateway_gets_the_answer_format(tmp_path: Path) -> None:
    _, _, gateway, *_ = all_programs(make_deployment(tmp_path, engine="simulated", answer_format="hermes"))
    assert gateway.environ["BATON_GATEWAY_ANSWER_FORMAT"] == "hermes"


def test_the_index_and_the_gateway_get_redis(tmp_path: Path) -> None:
    kvindex, _, gateway, *_ = all_programs(make_deployment(tmp_path, engine="simulated"))
    assert kvindex.environ["BATON_KVINDEX_REDIS_URL"] == REDIS_URL
    assert gateway.environ["BATON_GATEWAY_REDIS_URL"] == REDIS_URL


def test_the_gateway_takes_stored_keys_if_told_to(tmp_path: Path) -> None:
    for stored, expected in ((True, "true"), (False, "")):
        _, _, gateway, *_ = all_programs(make_deployment(tmp_path, engine="simulated", stored_keys=stored))
        assert gateway.environ["BATON_GATEWAY_STORED_KEYS"] == expected


def test_secrets_stay_off_command_lines(tmp_path: Path) -> None:
    programs = all_programs(make_deployment(tmp_path, engine="simulated"))
    words = " ".join(word for program in programs for word in program.command)
    assert "nats-token" not in words
    assert "redis-password" not in words
    secrets = {program.environ.get(f"BATON_{program.name[:-2].upper()}_AGENT_SECRET") for program in programs[3:]}
    assert len(secrets) == 1
    assert secrets.isdisjoint({None, ""}), "all workers share one secret"
    assert not any(secret and secret in words for secret in secrets)
    assert all(NATS_URL in program.environ.values() for program in programs)


def test_vllm_workers_run_in_their_own_environment_and_others_here(tmp_path: Path) -> None:
    programs = {
        program.name: program for program in all_programs(make_deployment(tmp_path, engine="vllm", device="cpu"))
    }
    assert programs["decode-0"].command[0] == str(tmp_path / "python")
    assert programs["gateway"].command[0] != str(tmp_path / "python")


def test_each_role_may_have_its_own_engine_with_its_own_flags(tmp_path: Path) -> None:
    deployment = make_deployment(
        tmp_path,
        device="cpu",
        prefill_engine="vllm",
        decode_engine="sglang",
        engine_options={"dtype": "float32", "vllm": {"block_size": 64}, "sglang": {"page_size": 1}},
    )
    programs = {program.name: program for program in all_programs(deployment)}
    for name, python, engine, own, other in (
        ("prefill-0", "python", "vllm", "block_size", "page_size"),
        ("decode-0", "sglang-python", "sglang", "page_size", "block_size"),
    ):
        command = programs[name].command
        assert command[0] == str(tmp_path / python)
        assert command[command.index("--engine") + 1] == engine
        options = json.loads(command[command.index("--engine-options") + 1])
        assert options["dtype"] == "float32"
        assert own in options
        assert other not in options
        assert "vllm" not in options


def test_a_simulated_engine_hands_off_to_its_like_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="simulated"):
        check_deployment(make_deployment(tmp_path, engine="simulated", decode_engine="sglang", pythons={}))


def test_the_users_engine_options_win(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, device="cpu", engine_options={"dtype": "bfloat16", "max_model_len": 100})
    program = next(program for program in all_programs(deployment) if program.name == "decode-0")
    options = json.loads(flags(program)["--engine-options"])
    assert options["dtype"] == "bfloat16"
    assert options["max_model_len"] == 100
    assert options["num_gpu_blocks_override"] > 0, "what the user did not name keeps its default"


def test_the_users_environment_wins_over_the_thread_count(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, device="cpu")
    environ = {"OMP_NUM_THREADS": "7"}
    programs = worker_programs(deployment, model_path=Path("/model"), nats_url=NATS_URL, environ=environ)
    assert [program.environ["OMP_NUM_THREADS"] for program in programs] == ["7", "7"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": 0}, "DECODE=1"),
        ({"prefill": -1}, "PREFILL=0 or more"),
        ({"prefill": 0, "disaggregation": Disaggregation.ALWAYS}, "DISAGGREGATION=auto"),
        ({"prefill": 100, "decode": 29}, "129 workers are too many"),
        ({"kv_pool_bytes": 0, "kv_file_bytes": 1 << 30}, "it needs KV_POOL_BYTES"),
        ({"kv_file_bytes": -1}, "KV_FILE_BYTES=-1"),
        ({"port": 0}, "PORT=0 is no port"),
        ({"port": 70000}, "PORT=70000 is no port"),
        ({"host": "203.0.113.1", "api_key": "k"}, "cannot listen on 203.0.113.1"),
        ({"engine": "vllm"}, "ENGINE=simulated"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    deployment = make_deployment(tmp_path, **{"engine": "simulated", "port": free_port(), **changes})
    with pytest.raises(ConfigurationError) as caught:
        check_deployment(resolve(deployment, gpu=False))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_prefill_worker_is_fine_where_nothing_needs_one(tmp_path: Path) -> None:
    check_deployment(
        make_deployment(tmp_path, engine="simulated", port=free_port(), prefill=0, disaggregation=Disaggregation.AUTO)
    )


def test_a_port_in_use_is_named_with_another_to_try(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as caught:
            check_deployment(make_deployment(tmp_path, engine="simulated", port=port))
    assert f"port {port} is in use" in str(caught.value)
    assert f"PORT={port + 1}" in str(caught.value)


def test_a_port_that_is_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", used := free_port()))
        unused = free_port()
        monkeypatch.setattr(servers, "PORTS", (used, unused))
        assert {free_port() for _ in range(20)} == {unused}


def test_a_free_port_is_not_given_twice_before_its_server_listens() -> None:
    assert len({free_port() for _ in range(500)}) == 500


def test_ports_for_processes_that_do_not_listen_yet_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {free_port() for _ in range(4)}
    monkeypatch.setattr(servers, "PORTS", tuple(ports))
    taken = min(ports)
    assert sorted(servers.free_ports(len(ports) - 1, but=taken)) == sorted(ports - {taken})


def test_a_model_must_be_there_and_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model folder"):
        find_model(str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no weights"):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_model(str(tmp_path)) == tmp_path


def test_a_model_is_called_as_its_folder_or_its_hub_id(tmp_path: Path) -> None:
    (tmp_path / "Qwen3").mkdir()
    assert make_deployment(tmp_path, model=str(tmp_path / "Qwen3") + "/").model_name == "Qwen3"
    assert make_deployment(tmp_path, model="Qwen/Qwen3-0.6B").model_name == "Qwen/Qwen3-0.6B"
    assert make_deployment(tmp_path).model_name == "tiny"


def test_a_port_that_others_reach_asks_for_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "box.example"):
        with pytest.raises(ConfigurationError, match=r"API_KEY="):
            check_deployment(make_deployment(tmp_path, engine="simulated", host=host))
    deployment = make_deployment(tmp_path, engine="simulated", host="0.0.0.0", port=free_port(), api_key="k-1")
    check_deployment(deployment)
    gateway = next(program for program in all_programs(deployment) if program.name == "gateway")
    assert gateway.environ["BATON_GATEWAY_API_KEYS"] == "k-1"
    assert "k-1" not in gateway.command


def test_the_printed_address_is_one_that_a_client_here_can_use(tmp_path: Path) -> None:
    assert make_deployment(tmp_path, host="0.0.0.0").address == "http://127.0.0.1:8000"
    assert make_deployment(tmp_path, host="::1").address == "http://[::1]:8000"


def test_a_long_context_is_bounded_on_a_cpu_only() -> None:
    assert context_limit("vllm", {"max_position_embeddings": 40960}, device="cpu") == {"max_model_len": 8192}
    assert context_limit("sglang", {"max_position_embeddings": 40960}, device="cpu") == {"context_length": 8192}
    assert context_limit("vllm", {"max_position_embeddings": 40960}, device="cuda") == {}
    assert context_limit("vllm", {"max_position_embeddings": 4096}, device="cpu") == {}
    assert context_limit("vllm", {}, device="cpu") == {}


def test_workers_share_the_machine() -> None:
    assert worker_threads("cpu", cores=16, workers=2) == {"OMP_NUM_THREADS": "8"}
    assert worker_threads("cpu", cores=16, workers=1) == {"OMP_NUM_THREADS": "15"}, "one core serves"
    assert worker_threads("cpu", cores=1, workers=1) == {"OMP_NUM_THREADS": "1"}
    assert worker_threads("cpu", cores=1, workers=2) == {"OMP_NUM_THREADS": "1"}
    assert worker_threads("cuda", cores=16, workers=2) == {}
    shares = engine_defaults("vllm", device="cuda", tiny=False, workers_per_gpu=2)
    assert shares["gpu_memory_utilization"] == pytest.approx(0.425)


def test_an_end_is_described() -> None:
    assert describe_exit(2) == "ended with status 2"
    assert describe_exit(-9) == "was killed (SIGKILL)"


def test_malformed_engine_options_are_named() -> None:
    for text in ("[1]", "{", "3"):
        with pytest.raises(ConfigurationError, match="engine options"):
            run(["up", "--engine-options", text], {})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--disaggregation", "maybe"), "--disaggregation: invalid choice: 'maybe' (choose from 'always', 'auto'"),
        (("--prefill", "many"), "--prefill: invalid int value: 'many'"),
        (("--engin", "vllm"), "unrecognized arguments: --engin"),
    ],
)
def test_malformed_flags_are_named(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["up", *flags], {})
    assert caught.value.code == EXIT_MISCONFIGURED
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--top", "-1"), "argument --top: '-1' is no number, or less than 0"),
        (("--tokens", "1,-5"), "'1,-5' is no list of token ids like 1,2,3"),
        (("--tokens", f"1,{1 << 32}"), "'1,4294967296' is no list of token ids like 1,2,3"),
    ],
)
def test_numbers_that_no_index_knows_are_named(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises((SystemExit, InvalidRequest)) as caught:
        run(["index", *flags, "--nats-url", "nats://127.0.0.1:1"], {})
    assert words in capsys.readouterr().err + str(caught.value)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["up", "--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--host", "--port", "--prefill", "--decode", "--model", "--engine", "--device", "--nats-url"):
        assert flag in text
    words = " ".join(text.split())
    assert "--stored-keys take the API keys that `baton keys create` makes, beside those in API_KEY" in words
    assert "on GPUs never, unless --kv-path is staged or gpu" in words
    assert "on GPUs KV is handed off with staged or gpu only" in words


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "below")
    asked = ["baton", "up", "--engine", "simulated", "--port", str(free_port()), "--folder", place]
    monkeypatch.setattr("sys.argv", asked)
    assert main() == EXIT_FAILED
    said = capsys.readouterr().err
    assert place in said
    assert "--folder" in said


def test_each_worker_has_its_share_of_memory_for_a_kv_pool_unless_a_size_is_given(tmp_path: Path) -> None:
    def pool(**changes: object) -> tuple[object, object]:
        deployment = make_deployment(tmp_path, device="cpu", **changes)
        program = next(program for program in all_programs(deployment) if program.name == "decode-0")
        options = json.loads(flags(program)["--engine-options"])
        return options.get("kv_pool_bytes"), options.get("kv_pool_workers")

    assert pool() == ("auto", 2)
    assert pool(prefill=3, decode=4) == ("auto", 7)
    assert pool(kv_pool_bytes=0) == (None, None)
    assert pool(kv_pool_bytes=1 << 30) == (1 << 30, None)
    assert pool(kv_pool_bytes=1 << 30, engine_options={"kv_pool_bytes": 5}) == (5, None)


def test_each_worker_has_its_own_file_in_one_folder(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, device="cpu", engine="vllm", kv_pool_bytes=1 << 30)
    assert all("--kv-folder" not in program.command for program in all_programs(deployment))
    for folder in (None, tmp_path / "kv"):
        programs = all_programs(replace(deployment, kv_file_bytes=1 << 40, kv_folder=folder))
        workers = [flags(program) for program in programs if "-" in program.name]
        assert [worker["--worker"] for worker in workers] == ["prefill-0", "decode-0"]
        for worker in workers:
            assert worker["--kv-folder"] == str(folder or deployment.folder / ".cache" / "kv")
            assert worker["--kv-file-bytes"] == str(1 << 40)


@pytest.mark.parametrize("text", ["much", "-1", "1e9", ""])
def test_malformed_pool_sizes_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="number of bytes or auto"):
        parse_pool_bytes(text)
