#compdef inv ./inv
# Completion of ./inv for zsh. In ~/.zshrc, after compinit: eval "$(/path/to/inv completion zsh)"
_pitorch_inv() {
    local -a candidates
    # Invoke completes the words up to the cursor; the first one must be inv. "~/…" is not expanded yet.
    candidates=(${(f)"$(${${(Q)words[1]}/#\~/$HOME} --complete -- inv ${words[2,CURRENT]} 2>/dev/null)"})
    compadd -a candidates || _files
}
compdef _pitorch_inv inv ./inv
