# Completion of ./inv for fish. In ~/.config/fish/config.fish: /path/to/inv completion fish | source
function __pitorch_inv
    set --local words (commandline --tokenize --cut-at-cursor) (commandline --current-token)
    # Invoke completes the words up to the cursor; the first one must be inv.
    $words[1] --complete -- inv $words[2..-1] 2>/dev/null
end
complete --command inv --arguments '(__pitorch_inv)'
