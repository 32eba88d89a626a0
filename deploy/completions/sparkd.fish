# Completes the verbs and options of sparkd in fish. The words come from sparkd itself.
function __sparkd_complete --argument-names action
    env _SPARKD_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$action _TYPER_COMPLETE_ARGS=(commandline -cp) sparkd 2>/dev/null
end
complete --command sparkd --no-files --arguments "(__sparkd_complete get-args)" --condition "__sparkd_complete is-args"
