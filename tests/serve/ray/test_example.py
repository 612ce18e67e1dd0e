"""`examples/ray_serve.yaml` is what Ray Serve takes, and names what builds an application; its fields are the command's flags."""

import importlib
from pathlib import Path

import pytest
import typer.main
import yaml
from pydantic import ValidationError

from freemoe.cli import app
from freemoe.core.errors import FreeMoEError, RecipeError, WorkerError
from freemoe.distributed.ray_pool import set_auth_token
from freemoe.serve.ray.launch import missing_packages, require_room, share_of
from freemoe.serve.settings import ServeSettings

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="needs Ray Serve: pip install 'freemoe[serve-ray]'"),
    # Of Ray Serve's own modules, when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("no_key"),
]

FILE = Path(__file__).resolve().parents[3] / "examples" / "ray_serve.yaml"


@pytest.fixture(scope="module")
def config():
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def builder(config):
    module, _, name = config["applications"][0]["import_path"].partition(":")
    return getattr(importlib.import_module(module), name)


def args_of(config, folders, **more):
    """Those of the file, with folders that are there."""
    here = {"base": str(folders.own), "expert_root": [str(folders.root)]}
    return {**config["applications"][0]["args"], **here, **more}


def test_ray_serve_takes_the_file(config):
    set_auth_token()
    from ray.serve.schema import ServeDeploySchema

    read = ServeDeploySchema.model_validate(config)
    assert read.applications[0].import_path == "freemoe.serve.ray.launch:app"
    args = ServeSettings.model_validate(config["applications"][0]["args"])
    # The gate knows by its host who can reach the server.
    assert args.host == read.http_options.host


def test_the_import_path_builds_an_application(config, folders):
    set_auth_token()
    from ray.serve import Application

    made = builder(config)(args_of(config, folders, experts=[f"x-={folders.more}"]))
    assert isinstance(made, Application)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"host": "0.0.0.0"}, RecipeError, "FREEMOE_API_KEY"),
        ({"replicas": 0}, ValidationError, "greater than or equal to 1"),
        ({"slots": 3}, ValidationError, "slots"),
        ({"device": "cuda:1"}, RecipeError, "a device of one machine"),
        ({"device": "split"}, RecipeError, "one device"),
        ({"base": "/not/here"}, FreeMoEError, "/not/here"),
        ({"experts": ["/not/here"]}, FreeMoEError, "/not/here"),
    ],
)
def test_what_the_builder_refuses(config, folders, more, error, words):
    set_auth_token()
    with pytest.raises(error, match=words):
        builder(config)(args_of(config, folders, **more))


def test_fields_have_the_flags_defaults():
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {one.opts[0].removeprefix("--").replace("-", "_"): one.default for one in command.params}
    for name, field in ServeSettings.model_fields.items():
        if name != "base":
            default = field.default or None
            assert (flags[name] or None) == default, name


def test_replicas_share_a_machine_of_their_own():
    assert share_of(2, 2, 1) == 1
    assert share_of(2, 4, 1) == 0.5
    assert share_of(16, 2, 4) == 4
    for cores, replicas in ((2, 3), (8, 7), (96, 64)):
        assert share_of(cores, replicas, 9) * replicas <= cores


def test_a_cluster_without_room_is_told_before_anything_starts(monkeypatch):
    set_auth_token()
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    require_room(2, 4.0, False)
    with pytest.raises(WorkerError, match="they want 12 CPUs and 0 accelerators, and it has 8 and 0"):
        require_room(3, 4.0, False)
    with pytest.raises(WorkerError, match="2 accelerators"):
        require_room(2, 1.0, True)
