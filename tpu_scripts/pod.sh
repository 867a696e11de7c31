# shellcheck shell=bash
# Sourced by `tpu`: what is asked of gcloud, and of the machines of the pod "$name".

mount=/mnt/shared # of every machine

# -- targets: what gcloud calls a slice, and the software of its machines

# Where gcloud is told a number of chips or cores only, the shape must be the one that it gives to that number.
flat="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
deep="2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"

read_target() { # read_target v5e:16x16*2: sets track, slice, runtime, slices
    local legal="v4|v5p|tpu7x:AxBxC, v5e|v6e:AxB, and *N for N slices" chips shapes=
    [[ $1 =~ ^(v4|v5e|v5p|v6e|tpu7x):([1-9][0-9]*(x[1-9][0-9]*)+)(\*([1-9][0-9]*))?$ ]] ||
        wrong "--target: $1 is no TPU target (legal: $legal)"
    local kind=${BASH_REMATCH[1]} shape=${BASH_REMATCH[2]}
    slices=${BASH_REMATCH[5]:-1} track='' chips=$((${shape//x/*}))
    case $kind in # the flags of v4 are in gcloud's stable track, those of v5p in alpha
        v4) slice=(--type=v4 "--topology=$shape") runtime=tpu-ubuntu2204-base ;;
        v5p) slice=(--type=v5p "--topology=$shape") runtime=v2-alpha-tpuv5 track=alpha ;;
        v5e) slice=("--accelerator-type=v5litepod-$chips") runtime=v2-alpha-tpuv5-lite shapes=$flat ;;
        v6e) slice=("--accelerator-type=v6e-$chips") runtime=v2-alpha-tpuv6e shapes=$flat ;;
        tpu7x) slice=("--accelerator-type=tpu7x-$((2 * chips))") runtime=v2-alpha-tpu7-ubuntu2404 shapes=$deep ;;
    esac
    if [[ $shapes ]]; then
        [[ " $shapes " == *" $shape "* ]] || wrong "--target: $1 is no shape of a $kind slice (legal: $shapes)"
    else
        [[ $shape == *x*x* && $shape != *x*x*x* ]] || wrong "--target: $1 is no shape of a $kind slice (legal: AxBxC)"
    fi
}

# -- gcloud

gcloud_on() { # gcloud_on VERB ARGUMENT...: of queued resources, without questions
    local place=() prefix=()
    [[ ! ${option[--zone]-} ]] || place+=("--zone=${option[--zone]}")
    [[ ! ${option[--project]-} ]] || place+=("--project=${option[--project]}")
    [[ $1 != create || ! $track ]] || prefix=("$track")
    run gcloud "${prefix[@]}" compute tpus queued-resources "$@" "${place[@]}" --quiet
}

reach() { # reach ssh|scp ARGUMENT...: machines of the pod. gcloud goes on without nodes that do not answer; we do not
    local how=()
    [[ ! ${option[--iap]-} ]] || how=(--tunnel-through-iap)
    [[ ! ${option[--internal-ip]-} ]] || how=(--internal-ip)
    gcloud_on "$@" "${how[@]}" || return
    if grep -q 'Could not prepare all' "$scratch/errors"; then
        echo 'ERROR: not all nodes of the pod can be reached' >"$scratch/errors"
        return 1
    fi
}

alive=(--ssh-flag=-oConnectTimeout=15 --ssh-flag=-oServerAliveInterval=15) # notice within a minute that it has died
on_all() { reach ssh "$name" --node=all --worker=all "${alive[@]}" --command="$1"; }
on_first() { reach ssh "$name" --node=0 --worker=0 "${alive[@]}" --command="$1"; }

worker() { # the line that calls the script `worker` on a machine
    printf 'test -x jaxpar/tpu_scripts/worker || { echo "worker: nothing is installed: tpu fill" >&2; exit 3; }; '
    quoted jaxpar/tpu_scripts/worker "$@"
}

look() { # sets state, age, reason: of the queued resource; state is NONE without one, UNKNOWN if nobody says
    local line created
    reason='' age='' state=NONE
    local fields='value[separator="|"](state.state,createTime,state.failedData.error.message)'
    if line=$(gcloud_on describe "$name" "--format=$fields"); then
        IFS='|' read -r state created reason <<<"$line"
        created=$(date -d "$created" +%s 2>/dev/null) || return 0 # not every date can read one
        age=" since $(ago $(($(date +%s) - created)))"
    elif ! grep -qE 'NOT_FOUND|was not found' "$scratch/errors"; then
        state=UNKNOWN reason=$(problem)
    fi
}

create() {
    local flags=("${slice[@]}" "--runtime-version=${option[--runtime-version]:-$runtime}")
    if ((slices > 1)); then flags+=("--node-count=$slices"); else flags+=("--node-id=$name"); fi
    [[ ! ${option[--spot]-} ]] || flags+=(--spot)
    [[ ! ${option[--reserved]-} ]] || flags+=(--reserved)
    flags+=(--scopes=https://www.googleapis.com/auth/cloud-platform "${more[@]}") # the scope: to write to a bucket
    say "create   $name: ${option[--target]}"
    gcloud_on create "$name" "${flags[@]}"
}

delete() {
    say "delete   $name"
    gcloud_on delete "$name" --force
}

# -- its machines

fill() { # the checkout on all machines; what was sent before and is gone from it goes there too
    local archive=$scratch/jaxpar.tar.gz pack unpack what
    [[ ! ${option[--dry-run]-} ]] || archive=/tmp/jaxpar.tar.gz
    # shellcheck disable=SC2016  # it is the inner shell that expands
    pack='cd "$1" && git archive --format=tar.gz -o "$2" "$(git stash create | grep . || echo HEAD)"'
    what=$(git -C "$here" log -1 --format='%h %s' 2>&1) || fail "$here: is no git checkout, whose files could be sent"
    git -C "$here" diff --quiet HEAD || what+=", with changes"
    say "fill     $name: $what"
    run bash -c "$pack" pack "$here" "$archive" || fail "$here: $(problem)"
    unpack='test ! -x jaxpar/tpu_scripts/worker || jaxpar/tpu_scripts/worker free && mkdir -p jaxpar && cd jaxpar && '
    unpack+='touch .sent && xargs -d "\n" rm -f < .sent && tar -xzvf ../jaxpar.tar.gz | grep -v /$ > .sent && '
    unpack+="tpu_scripts/worker fill ${option[--share]-}"
    reach scp "$archive" "$name:jaxpar.tar.gz" --node=all --worker=all || return
    if [[ ${option[--quiet]-} ]]; then on_all "$unpack" >/dev/null; else on_all "$unpack"; fi
}

begin() { # begin ID: start the command on all machines
    say "run      $name: ${command[*]}"
    on_all "$(worker start "$1" "${command[@]}")"
}

offset=0
ask() { # print what the run on the first machine has written since; sets doing, id, code. ask end: print nothing
    local answer log
    local filled="test -x jaxpar/tpu_scripts/worker || { echo '#0 empty'; exit; }"
    answer=$(on_first "$filled; jaxpar/tpu_scripts/worker report ${1:-$offset}") || return
    [[ $answer == *'#'* ]] || return
    read -r offset doing id code <<<"${answer##*#}"
    log=${answer%#*} log=${log%$'\n'}
    [[ ! $log ]] || { end_progress && printf '%s' "$log"; }
}
