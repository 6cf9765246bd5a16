# Sourced by launch/quickstart.sh and tests/run.sh, from the repository root: a virtual environment with what the
# script needs, first on PATH. Made when missing, installed again only when pyproject.toml, setup.py or
# requirements.txt changed, or when it lacks the extras that the script needs.
#
#   MEGACORE_VENV   where it is (.venv)            PYTHON   the interpreter to make it with (the first >= 3.11)
#   megacore_extras, set by the script before: the extras of pyproject.toml that it needs, such as [test]

megacore_fail() {
    printf '%s\n' "$1" >&2
    exit 2
}

# Prints the first interpreter that is new enough, whatever else answers to python3.
megacore_find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    megacore_fail "megacore needs Python 3.11 or newer, found: $("${PYTHON:-python3}" --version 2>&1) (install one, or set PYTHON=/path/to/python3)"
}

# Shows a long command's output as one changing line on a terminal, keeps all of it in the log, and its end on failure.
megacore_follow() {
    local log=$1 line
    shift
    if [ -t 1 ]; then
        "$@" 2>&1 | tee "$log" | while IFS= read -r line; do printf '\r\033[K  %.*s' "$((${COLUMNS:-80} - 3))" "$line"; done
        local status=${PIPESTATUS[0]}
        printf '\r\033[K'
    else
        "$@" >"$log" 2>&1
        local status=$?
    fi
    [ "$status" -eq 0 ] || { tail -n 15 "$log" >&2 && return "$status"; }
}

megacore_environment() {
    local venv=${MEGACORE_VENV:-.venv} wanted=${megacore_extras:-} installed="" installed_stamp="" python stamp began=$SECONDS
    case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
    # The folder is part of the stamp: an editable install points at it, so a moved checkout installs again.
    stamp=$(printf '%s\n' "$PWD" "$venv" | cat - pyproject.toml setup.py requirements.txt | cksum)
    if [ -f "$venv/megacore.stamp" ]; then
        { read -r installed_stamp && read -r installed; } <"$venv/megacore.stamp" || true
    fi
    # Extras that were installed once stay: the quickstart after the tests must not leave them at old versions.
    wanted=${wanted:-$installed}
    if [ "$installed_stamp" != "$stamp" ] || [ "$installed" != "$wanted" ]; then
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            python=$(megacore_find_python) || exit
            "$python" -c 'import ensurepip, venv' 2>/dev/null ||
                megacore_fail "$python has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
            printf 'making a virtual environment in %s with %s\n' "$venv" "$("$python" --version)"
            "$python" -m venv "$venv" || megacore_fail "cannot make a virtual environment in $venv (remove that folder if it is a broken one)"
        fi
        printf 'installing megacore and what it needs (the first time, minutes; log: %s)\n' "$venv/install.log"
        rm -f "$venv/megacore.stamp"
        PIP_DISABLE_PIP_VERSION_CHECK=1 megacore_follow "$venv/install.log" \
            "$venv/bin/python" -m pip install --no-compile -c requirements.txt -e ".$wanted" ||
            megacore_fail "the installation failed (log: $venv/install.log); the same command tries again"
        printf '%s\n' "$stamp" "$wanted" >"$venv/megacore.stamp"
        printf 'installed in %d s\n' "$((SECONDS - began))"
    fi
    # Compiled when it is first imported, most of it never; without that, every process would compile what it imports.
    unset PYTHONDONTWRITEBYTECODE
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
}

megacore_environment
