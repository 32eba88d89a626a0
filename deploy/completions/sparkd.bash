# Completes the verbs and options of sparkd in bash. The words come from sparkd itself.
_sparkd() {
    mapfile -t COMPREPLY < <(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _SPARKD_COMPLETE=complete_bash "$1" 2>/dev/null)
}
complete -o default -F _sparkd sparkd
