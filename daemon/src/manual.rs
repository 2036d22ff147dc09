//! The manual page paced(8): the help texts of the command line, and further facts about the daemon.

use std::{fmt::Write as _, io};

use clap::{Arg, Command};
use config::escaped;

/// Returns the page in man(7) format.
///
/// # Errors
/// Writing to memory fails.
pub fn page(command: &Command) -> io::Result<Vec<u8>> {
    let mut command = command.clone();
    command.build();
    let man = clap_mangen::Man::new(command.clone()).section("8").manual("System administration");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    let mut text = String::from(".SH SYNOPSIS\n");
    let mut commands = Vec::new();
    collect(&command, &mut commands);
    for command in &commands {
        // Writing to a string cannot fail.
        _ = writeln!(text, "\\fB{}\\fR\n.br", escaped(&usage(command)));
    }
    text.push_str(DESCRIPTION);
    text.push_str(".SH COMMANDS\n");
    for command in &commands {
        _ = writeln!(text, ".SS {}", escaped(&usage(command)));
        let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
        _ = writeln!(text, "{}", escaped(&about).replace("\n\n", "\n.PP\n"));
        command.get_arguments().filter(|of| !of.is_hide_set()).for_each(|of| text.push_str(&argument(of)));
    }
    text.push_str(TAIL);
    page.extend(text.into_bytes());
    Ok(page)
}

/// Collects the commands that have no subcommands, at any depth.
fn collect(command: &Command, found: &mut Vec<Command>) {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help") {
        if below.has_subcommands() {
            collect(below, found);
        } else {
            found.push(below.clone());
        }
    }
}

fn usage(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    usage.strip_prefix("Usage: ").unwrap_or(&usage).to_owned()
}

fn argument(of: &Arg) -> String {
    let names = of.get_value_names().unwrap_or_default().iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
    let takes_value = of.get_action().takes_values();
    let long = of.get_long().map(|long| format!("\\-\\-{}", escaped(long)));
    let head = match (long, takes_value) {
        (Some(long), true) => format!("\\fB{long}\\fR \\fI{}\\fR", escaped(&names)),
        (Some(long), false) => format!("\\fB{long}\\fR"),
        (None, _) => format!("\\fI{}\\fR", escaped(&names)),
    };
    let help = of.get_help().map(ToString::to_string).unwrap_or_default();
    let defaults: Vec<_> = of.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match takes_value && !defaults.is_empty() {
        true => format!("\nWithout it, {}.", escaped(&defaults.join(" "))),
        false => String::new(),
    };
    let end = if help.ends_with('.') { "" } else { "." };
    format!(".TP\n{head}\n{}{end}{default}\n", escaped(&help))
}

const DESCRIPTION: &str = r"
.SH DESCRIPTION
paced relays UDP and TCP by MASQUE (RFC 9298, RFC 9114) and, as the edge role, carries local traffic through such a relay. It runs in the
foreground. The packaged service is
.BR systemctl (1)\(aqs
.IR paced.service ,
which runs
.BR paced\ run\ \-\-config\ /etc/paced/paced.toml .
.PP
Without
.B \-\-config
it runs in development mode, for this machine only: a relay on localhost, port 4433, with a certificate of its own, open to
everyone on this machine, and a UDP echo on 127.0.0.1, port 4434.
.PP
While it runs,
.BR pacectl (1)
shows what it does and changes its policy.
";

const TAIL: &str = r".SH SIGNALS
.TP
.B SIGHUP
Reads the configuration and the files that it names again. If a key cannot be used or requires a restart, paced logs its name and changes
nothing.
.B pacectl reload
does the same and prints the result. paced also reads files that the configuration names when they change. If it cannot use them, it reads them again each minute.
In development mode, which has no configuration, paced ends as after SIGTERM, unless it was started to ignore SIGHUP, as by
.BR nohup (1).
.TP
.BR SIGTERM ,\  SIGINT
Accepts no new connections and requests, lets open ones go on for
.I drain_seconds
at most, closes them and ends. A second signal ends paced at once.
.SH FILES
.TP
.I /etc/paced/paced.toml
The configuration of the packaged service, see
.BR paced.toml (5).
.TP
.I /etc/paced/conf.d/*.toml
Drop\-ins, which paced merges into the configuration in the order of their names. With another
.BR \-\-config ,
paced takes them from conf.d beside that file. The configuration and each of them must be a regular file of at most 16 MiB, not a pipe.
.TP
.I /etc/paced/tls
Certificates and keys, readable to the group paced.
.TP
.I /var/lib/paced
The state folder
.RI ( state_dir
in the configuration), which survives restarts. It contains the secret of connection IDs and address tokens, and a saved policy.
quotas.json contains how much users have used of their quotas, and tokens.json how many tokens the clients of a gateway have used this
month. engines.json contains what a gateway has learned of its engines and of the lengths of answers. If decisions are recorded,
decisions.jsonl and decisions.1.jsonl contain what the policies of aliases decided. The running daemon holds a lock on .lock.
.TP
.I /run/paced/control.sock
The control socket, to which
.BR pacectl (1)
connects.
.TP
.IR $XDG_STATE_HOME/paced ,\  ~/.local/state/paced
The certificate and the secret of development mode. A user without a home has them in
.IR /var/lib/paced\-development .
.SH ENVIRONMENT
.TP
.B RUST_LOG
Replaces
.I level
of [log]: a level, or directives such as
.BR edge=debug .
.SH EXIT STATUS
.TP
.B 0
paced ended after a signal. For
.BR check :
the configuration can be used, with or without warnings.
.TP
.B 1
paced could not start or could not continue. For
.BR check :
the configuration cannot be used. Standard error says why.
.TP
.B 2
The arguments are wrong.
.TP
.B 78
The configuration of
.B run
cannot be read or is not valid, so that each start fails until it is corrected. Standard error says why.
.SH SEE ALSO
.BR paced.toml (5),
.BR pacectl (1)
";
