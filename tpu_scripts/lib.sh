# shellcheck shell=bash
# Sourced by the scripts beside it: arguments, messages, and dry runs.

set -euo pipefail
((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44)) || {
    echo "${0##*/}: bash $BASH_VERSION is too old (needed: 4.4 or newer)" >&2
    exit 2
}

script=${0##*/}
poll=${JAXPAR_POLL_SECONDS:-30}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: >"$scratch/errors"

wrong() { # the input is wrong: one line, before anything is done
    printf '%s: %s\n' "$script" "$1" >&2
    exit 2
}

fail() { # what was asked for did not work: one line, and an exit code
    end_progress
    printf '%s: %s\n' "$script" "$1" >&2
    exit "${2:-1}"
}

usage() { # the comment at the top of the script
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
}

[[ $poll =~ ^[0-9]+(\.[0-9]+)?$ ]] || wrong "JAXPAR_POLL_SECONDS: $poll is no number of seconds (legal: 30)"

# -- arguments

declare -A option=() # of the command line, by flag
declare -a names=() command=() more=()

parse() { # parse "--zone= --spot" ARGUMENT...: the legal flags; "=" takes a value; what follows -- is the command
    local legal=" $1 " flag value
    shift
    while (($#)); do
        flag=${1%%=*} value=
        case $1 in
            -h | --help) usage && exit 0 ;;
            --)
                command=("${@:2}")
                return
                ;;
            --*)
                [[ ! ${option[$flag]-} || $flag == --also ]] || wrong "$flag: is given twice"
                if [[ $legal == *" $flag= "* ]]; then
                    if [[ $1 == *=* ]]; then
                        value=${1#*=}
                    else
                        value=${2-}
                        [[ $value != --* ]] || value=
                        shift
                    fi
                    [[ $value ]] || wrong "$flag: has no value (write $flag=VALUE)"
                    [[ $flag != --also ]] || more+=("$value")
                    option[$flag]=$value
                elif [[ $legal == *" $flag "* ]]; then
                    [[ $1 != *=* ]] || wrong "$flag: ${1#*=} is a value, and it takes none"
                    option[$flag]=yes
                else
                    wrong "$flag: is no option here (legal: $(sed 's/= */ VALUE /g; s/^ *//; s/ *$//' <<<"$legal"))"
                fi
                ;;
            *) names+=("$1") ;;
        esac
        shift
    done
}

run_folder() { # the value of --run in the command to be run
    local i
    for ((i = 0; i < ${#command[@]}; i++)); do
        case ${command[i]} in
            --run) printf '%s' "${command[i + 1]-}" ;;
            --run=*) printf '%s' "${command[i]#--run=}" ;;
        esac
    done
}

check_command() { # check_command LEGAL: what follows -- trains in a folder
    [[ ${command[0]-} == jaxpar && ${command[1]-} == train ]] ||
        wrong "--: '${command[*]-}' is no training (legal: -- jaxpar train CONFIG --run FOLDER ...)"
    local flags
    flags=$(printf '%s\n' "${command[@]}" | grep -cE '^--run(=|$)') || true
    ((flags < 2)) || wrong "--run: is given twice in '${command[*]}'"
    [[ $(run_folder) ]] || wrong "--run: is missing in '${command[*]}' (legal: $1)"
    [[ $(run_folder) != *://* ]] || wrong "--run: $(run_folder) is no folder (legal: $1)"
}

resume() { # the command begins the run, or goes on with it
    [[ " ${command[*]} " == *" --resume "* ]] || command+=(--resume)
}

confirm() { # a question at the terminal, or --yes
    [[ ! ${option[--yes]-}${option[--dry-run]-} ]] || return 0
    [[ -t 0 ]] || wrong "--yes: is missing, and there is no terminal to ask: $1"
    local answer
    read -r -p "$1 [y/N] " answer
    [[ $answer == [yY]* ]] || fail "nothing was done"
}

# -- what is said

say() { # in a dry run, between commands to paste, a comment
    [[ ! ${option[--quiet]-} ]] || return 0
    end_progress
    printf '%s%s\n' "${option[--dry-run]:+# }" "$1"
}

note() { # of a dry run alone: when the next command would be run
    [[ ! ${option[--dry-run]-} ]] || say "$1"
}

shown=
progress() { # progress STATE TEXT: one line that changes; where no terminal is, a line whenever STATE changes
    [[ ! ${option[--quiet]-} ]] || return 0
    if [[ -t 1 ]]; then
        printf '\r\033[K%s' "$2"
    elif [[ $shown != "$1" ]]; then
        printf '%s\n' "$2"
    fi
    shown=$1
}

end_progress() {
    [[ ! $shown || ! -t 1 ]] || printf '\n'
    shown=
}

ago() { # ago SECONDS
    if (($1 < 120)); then
        echo "$1 s"
    elif (($1 < 7200)); then
        echo "$(($1 / 60)) min"
    else
        echo "$(($1 / 3600)) h $(($1 % 3600 / 60)) min"
    fi
}

# -- what is run

quoted() { # the words as a shell reads them
    local word space=
    for word; do
        [[ $word =~ ^[-A-Za-z0-9_./:=@%+,]+$ ]] || word=${word@Q}
        printf '%s%s' "$space" "$word"
        space=' '
    done
}

run() { # a command, or in a dry run the line that would run it; its standard error is kept for `problem`
    if [[ ${option[--dry-run]-} ]]; then
        quoted "$@"
        printf '\n'
    else
        "$@" </dev/null 2>"$scratch/errors"
    fi
}

problem() { # why the last `run` failed, in one line: the script `worker`, gcloud's ERROR, or what came last
    local text
    text=$(grep -h '^worker: ' "$scratch/errors" | sort -u) ||
        text=$(sed -n '/ERROR:/,$p' "$scratch/errors" | grep .) ||
        text=$(tail -n 1 "$scratch/errors")
    text=$(tr -s '[:space:]' ' ' <<<"$text")
    text=${text#*ERROR: }
    ((${#text} <= 400)) || text=${text:0:400}...
    printf '%s' "${text% }"
}
