"""How the overlay reaches a Ray worker, how it gets lost, and that the driver refuses the loss it can foresee."""

import importlib
import json
import os

import pytest

pytest.importorskip("ray")
KEY = "ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH"

DRIVER = """
import json, os, sys
import ray

SMALL = dict(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)

def look():
    import os, sys
    engine = sys.modules.get("esgrpo.engine")
    return [bool(engine and engine._booted), os.path.exists("marker"), os.environ.get("ESGRPO_SEGMENT", "")]

environments = {
    "inherited": {},
    "env_vars": {"env_vars": {"ESGRPO_SEGMENT": "{}"}},
    "lost": {"env_vars": {"PYTHONPATH": sys.argv[1]}},
    "kept": {"env_vars": {"PYTHONPATH": os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])}},
}
task = ray.remote(num_cpus=1)(look)
ray.init(**SMALL)
answers = {name: ray.get(task.options(runtime_env=env).remote(), timeout=120) for name, env in environments.items()}
ray.shutdown()
ray.init(**SMALL, runtime_env={"working_dir": sys.argv[1]})  # a local directory is uploaded for a whole job only
answers["working_dir"] = ray.get(ray.remote(num_cpus=1)(look).remote(), timeout=120)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory, overlay, clean_environment, ray_driver):
    directory = tmp_path_factory.mktemp("runtime_env")
    work = directory / "work"
    work.mkdir()
    (work / "marker").write_text("")
    environment = {**clean_environment, "PYTHONPATH": overlay, "ESGRPO_ENABLE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = ray_driver(DRIVER, str(work), env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name, answer", [
    ("inherited", [True, False, ""]), ("working_dir", [True, True, ""]), ("env_vars", [True, False, "{}"]),
    ("lost", [False, False, ""]), ("kept", [True, False, ""]),
])
def test_a_worker_has_the_overlay(answers, name, answer, installed):
    """[overlay booted, working_dir applied, variable arrived]; "lost" is what the driver must refuse below."""
    assert answers[name] == [answer[0] or installed, *answer[1:]]


@pytest.fixture
def reach(monkeypatch):
    """_reach_every_worker on a config with these env_vars; returns the env_vars that Ray would get."""
    omegaconf = pytest.importorskip("omegaconf")
    driver_start = importlib.import_module("esgrpo.hooks.verl.run.driver_start")
    monkeypatch.setenv("ESGRPO_ENABLE", "1")
    monkeypatch.setenv("ESGRPO_SEGMENT", '{"enable": true}')
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(driver_start.sysconfig, "get_path", lambda name: "/nowhere")  # not installed

    def run(env_vars=None, ray_init=None):
        init = {"num_cpus": 8, **(ray_init or {})}
        if env_vars is not None:
            init["runtime_env"] = {"env_vars": env_vars}
        config = omegaconf.OmegaConf.create({"ray_kwargs": {"ray_init": init}})
        omegaconf.OmegaConf.set_struct(config, True)  # as Hydra composes it
        driver_start._reach_every_worker(config)
        assert config.ray_kwargs.ray_init.num_cpus == 8
        return omegaconf.OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)

    return run


def test_a_python_path_without_the_overlay_is_refused(reach):
    from esgrpo.errors import HookError

    for lost in ("/code", "/code:/more", "", "/code/overlay"):
        with pytest.raises(HookError) as caught:
            reach({"PYTHONPATH": lost})
        line = str(caught.value)
        assert line.startswith(f"esgrpo: {KEY}: {lost} | wanted a path with ") and "\n" not in line
        assert "the run does not start" in line


def test_a_python_path_with_the_overlay_is_accepted(reach, overlay):
    for kept in (overlay, f"/code:{overlay}", f"{overlay}{os.sep}", f"{overlay}/../overlay:/code"):
        assert reach({"PYTHONPATH": kept})["PYTHONPATH"] == kept


@pytest.mark.parametrize("where", ["purelib", "beside"])
def test_an_installed_overlay_needs_no_python_path(reach, monkeypatch, tmp_path, where):
    """An editable install keeps its .pth in site-packages, a wheel has it beside the package."""
    driver_start, config = map(importlib.import_module, ("esgrpo.hooks.verl.run.driver_start", "esgrpo.config"))
    (tmp_path / "esgrpo.pth").write_text("")
    if where == "purelib":
        monkeypatch.setattr(driver_start.sysconfig, "get_path", lambda name: str(tmp_path))
    else:
        monkeypatch.setattr(config, "__file__", str(tmp_path / "esgrpo" / "config.py"))
    assert reach({"PYTHONPATH": "/code"})["PYTHONPATH"] == "/code"


@pytest.mark.parametrize("env_vars", [None, {}, {"OTHER": "1"}])
def test_our_variables_travel_and_theirs_stay(reach, env_vars):
    found = reach(env_vars)
    assert found["ESGRPO_ENABLE"] == "1" and found["ESGRPO_SEGMENT"] == '{"enable": true}'
    assert "VERL_PLATFORM" not in found and "PYTHONPATH" not in found
    assert found.get("OTHER") == (env_vars or {}).get("OTHER")


def test_what_the_user_sets_wins(reach):
    assert reach({"ESGRPO_ENABLE": "0"})["ESGRPO_ENABLE"] == "0"
