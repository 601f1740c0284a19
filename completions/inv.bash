# Completion of ./inv for bash. In ~/.bashrc: eval "$(/path/to/inv completion bash)"
_pitorch_inv() {
    local candidates
    # Invoke completes the words up to the cursor; the first one must be inv. "~/…" is not expanded yet.
    candidates=$("${COMP_WORDS[0]/#\~/$HOME}" --complete -- inv "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null) || return
    mapfile -t COMPREPLY < <(compgen -W "$candidates" -- "$2")
}
complete -o default -F _pitorch_inv inv ./inv
