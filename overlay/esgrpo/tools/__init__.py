"""What a person asks for beside training; a run imports none of it.

doctor/ lint/ explain/ report/   each `esgrpo NAME`                 drift.py     `esgrpo drift`
hook_states, decided, books.py   `esgrpo status RUN_DIR [--books]`  apply.py     `./apply.sh`, of patchset.py
upstreams.py                     sources of any upstream release    language.py  English or Chinese answers
"""
