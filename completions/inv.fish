# Completion of ./inv for fish. In ~/.config/fish/config.fish: /path/to/inv completion fish | source
function __pitorch_inv
    set --local words (commandline --tokenize --cut-at-cursor) (commandline --current-token)
    set --local program (string replace --regex '^~' $HOME $words[1]) # "~/…" is not expanded yet
    # Invoke completes the words up to the cursor; the first one must be inv.
    $program --complete -- inv $words[2..-1] 2>/dev/null
end
complete --command inv --arguments '(__pitorch_inv)'
