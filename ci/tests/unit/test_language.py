"""Which language is spoken, and that of a text both languages are there."""

import pytest

from esgrpo import cli
from esgrpo.tools import language


@pytest.mark.parametrize("option, environment, wanted", [
    (None, {}, "en"),
    (None, {"LANG": "zh_CN.UTF-8"}, "zh"),
    (None, {"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
    (None, {"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"),
    (None, {"LANG": "en_US.UTF-8", "LC_ALL": ""}, "en"),
    ("en", {"LANG": "zh_CN.UTF-8"}, "en"),
    ("zh", {"LANG": "C"}, "zh")])
def test_the_option_beats_the_locale(option, environment, wanted):
    assert language.asked(option, environment) == wanted


def test_texts_of_a_table_and_of_a_file(tmp_path):
    table = {"cause": "full", "cause_zh": "满"}
    file = tmp_path / "texts.toml"
    file.write_text('[lines]\nen = "{count} lines"\nzh = "{count} 行"\n', encoding="utf-8")
    assert (language.of(table, "cause"), language.texts(file, "lines", count=3)) == ("full", "3 lines")
    with language.speaking("zh"):
        assert (language.of(table, "cause"), language.texts(file, "lines", count=3)) == ("满", "3 行")
        with pytest.raises(KeyError):
            language.of({"fix": "x"}, "fix")
    assert language.spoken() == "en"


@pytest.mark.parametrize("command", ["doctor", "lint", "explain", "drift", "top"])
def test_these_commands_take_the_option(command):
    operand = {"lint": ["x.sh"], "top": ["run"], "drift": ["vllm==1"]}.get(command, [])
    assert cli.parser().parse_args([command, *operand, "--lang", "zh"]).lang == "zh"
    with pytest.raises(SystemExit):
        cli.parser().parse_args([command, *operand, "--lang", "fr"])


def test_a_command_speaks_what_the_locale_says(monkeypatch):
    heard = []
    monkeypatch.setattr(cli, "doctor", lambda arguments: heard.append(language.spoken()) or 0)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    cli.main(["doctor"])
    cli.main(["doctor", "--lang", "en"])
    assert heard == ["zh", "en"]
