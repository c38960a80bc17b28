"""Everything is in setup.cfg; this places what lies outside of the package: esgrpo.pth beside it, patches/ in it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH = "esgrpo.pth"
LINE = 'import os; os.environ.get("ESGRPO_ENABLE") == "1" and __import__("esgrpo.boot")\n'


class Build(build_py):
    def run(self):
        if self.editable_mode:
            return super().run()
        shutil.rmtree(Path(self.build_lib, "esgrpo"), ignore_errors=True)  # of an earlier build: modules move
        super().run()
        Path(self.build_lib, PTH).write_text(LINE)
        shutil.copytree("patches", Path(self.build_lib, "esgrpo", "patches"), dirs_exist_ok=True)


class EditableWithPth(editable_wheel):  # its other .pth adds overlay/ to sys.path and sorts before ours
    def _install_namespaces(self, installation_dir, pth_prefix):  # the last step before the tree becomes the wheel
        super()._install_namespaces(installation_dir, pth_prefix)
        Path(installation_dir, PTH).write_text(LINE)  # so that RECORD lists it


setup(cmdclass={"build_py": Build, "editable_wheel": EditableWithPth})
