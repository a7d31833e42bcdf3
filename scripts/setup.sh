# Sourced from the repository root by scripts/demo, scripts/test and .ci/run: `prepare` makes a virtual environment with
# the project in it, `step` runs one command and says how long it took. Nothing here needs root, and pip's own settings
# (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf, ...) apply. HF_KVCACHE_VENV names another folder than .venv, PYTHON another
# interpreter than python3.

# Modules are compiled when they are first imported, and that is kept: without it every process compiles torch anew.
unset PYTHONDONTWRITEBYTECODE

current_step=Start
trap '[[ $? == 0 ]] || printf "✗ Failed: %s (%d s in all)\n" "$current_step" "$SECONDS" >&2' EXIT

# The command runs bare, not in `if` or before `||`: there bash would ignore `set -e` in all that it calls.
step() {
    local title=$1 start=$SECONDS
    current_step=$title
    shift
    printf '▸ %s\n' "$title" >&2
    "$@"
    printf '✓ %s (%d s)\n' "$title" $((SECONDS - start)) >&2
}

# prepare EXTRAS [CONSTRAINTS]: afterwards $python is the environment's interpreter. Does nothing when nothing changed.
prepare() {
    local extras=$1 constraints=${2:-constraints.txt}
    local venv=${HF_KVCACHE_VENV:-.venv}
    python=$venv/bin/python

    if [[ ! -x $python ]]; then
        step "Creating $venv" make_venv "$venv"
    fi
    # The stamp holds all that the install depends on, with the kernel's source and compiler: installing compiles it.
    local stamp=$venv/.prepared-$extras state
    state=$(
        pwd
        command -v c++ g++ clang++ || :
        cat pyproject.toml setup.py "$constraints" hf_kvcache/kernels/*.cpp | cksum
    )
    # Development has everything that the demo has.
    if ! holds "$stamp" "$state" && ! holds "$venv/.prepared-dev" "$state"; then
        # pip hides a failing compilation, after which an old library would pass for the new one.
        rm -f hf_kvcache/kernels/_cpu.so
        # First and alone: an unpinned torch may be another build, of several gigabytes. What builds packages comes with
        # it, once, instead of a new copy for every package that has to be built.
        step "Installing torch (a minute or two)" pip_install "$(grep '^torch==' "$constraints")" "setuptools>=77"
        step "Installing hf_kvcache[$extras] (a minute or two)" \
            pip_install --no-build-isolation -c "$constraints" -e ".[$extras]"
        printf '%s\n' "$state" >"$stamp"
    fi
    if [[ ! -e hf_kvcache/kernels/_cpu.so ]]; then
        printf '! No C++ kernels: decoding is slower without. To see why: %s -m pip install -v -e .\n' "$python" >&2
    fi
}

holds() {
    [[ -e $1 && $(<"$1") == "$2" ]]
}

make_venv() {
    local base=${PYTHON:-python3}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hf_kvcache needs Python 3.10 or newer")' || return
    # Half an environment would pass for a whole one next time.
    "$base" -m venv "$1" || { rm -rf "$1"; return 1; }
}

pip_install() {
    # Nothing is compiled ahead: of these packages' thousands of files, few are ever imported. Those are compiled then.
    "$python" -m pip install -qq --disable-pip-version-check --no-compile "$@"
}

fetch_demo_files() {
    "$python" scripts/fetch_demo_model.py >/dev/null
    "$python" scripts/fetch_eval_data.py >/dev/null
}
