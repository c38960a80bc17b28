"""Everything is in setup.cfg; this places esgrpo.pth beside the package, which setup.cfg cannot express."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH = "esgrpo.pth"
LINE = 'import os; os.environ.get("ESGRPO_ENABLE") == "1" and __import__("esgrpo.boot")\n'


class BuildWithPth(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, PTH).write_text(LINE)


class EditableWithPth(editable_wheel):
    """The editable wheel holds one more .pth, which adds overlay/ to sys.path; ours sorts after it."""

    def _install_namespaces(self, installation_dir, pth_prefix):
        """The last step that writes into the tree that becomes the wheel, so that RECORD lists our file."""
        super()._install_namespaces(installation_dir, pth_prefix)
        Path(installation_dir, PTH).write_text(LINE)


setup(cmdclass={"build_py": BuildWithPth, "editable_wheel": EditableWithPth})
