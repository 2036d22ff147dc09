# Makes the form of a page that the package installs, with `sed -Ez`: links lead only to installed files; other files are named.
s#\]\((\.\./)?config/paced\.toml\)#](/etc/paced/paced.toml)#g
s#\]\((\.\./)?perf/(grafana\.json|alerts\.yml)\)#](/usr/share/paced/\2)#g
s#\]\((\.\./)?((perf|daemon|config)/|(ARCHITECTURE|CONTRIBUTING|SECURITY)\.md)#](\n\2#g
s#!?\[`?([^][`]*)`?\]\(\n\1(\#[^)]*)?\)#`\1` of the source#g
s#!?\[([^][]*)\]\(\n([^)\#]*)[^)]*\)#\1: `\2` of the source#g
