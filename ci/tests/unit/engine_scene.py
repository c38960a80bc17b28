"""A throw-away upstream, and what every script on it starts with."""

UPSTREAM = '''
def f(x): return "plain " + x

class Base:
    def inherited(self, x): return "plain " + x

class C(Base):
    def method(self, x): return "plain " + x
    async def later(self, x): return "plain " + x
    @staticmethod
    def static(x): return "plain " + x
    @classmethod
    def klass(cls, x): return cls.__name__ + " " + x

class Stubborn(type):
    def __setattr__(cls, name, value): pass

class Ignores(metaclass=Stubborn):
    def method(self, x): return "plain " + x
'''
# Read by every script: declares hooks on the throw-away upstream and shows the states as JSON on the last line.
HELPERS = '''
import functools, json, sys, types
from esgrpo import engine, fingerprint, recorded
from esgrpo.engine import Hook, Record

throw_away = recorded.Upstream((">=1,<2",), {})
recorded.of_upstream = lambda upstream: throw_away

def tag(original):
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return "hooked " + original(*args, **kwargs)
    return replacement

def declare(slug="a", target="up.mod:f", kind="wrap", build=tag, tested=None, cured={}, **fields):
    if tested is None:
        tested = {"1.0": fingerprint.of_targets((target,))[0]}
    throw_away.hooks[slug] = recorded.Recorded(tested, cured)
    hook = Hook(slug, target, ("driver",), kind, "why", "when", unguarded="" if tested else "a test", **fields)
    code = build if isinstance(build, types.SimpleNamespace) else types.SimpleNamespace(build=build)
    engine._records[slug] = Record(hook, code)

def show(**more):
    print(json.dumps({**{row["slug"]: row["state"] for row in engine.states("driver")}, **more}))
'''
IMPORT = "import up.mod; "
RESULT = "\nshow(result=up.mod.f('x'))"
