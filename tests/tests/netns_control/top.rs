//! `pacectl top` on a terminal.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    process::{Child, Command},
    sync::{Arc, Mutex},
};

use lab::{
    process::wait_for,
    site::{Family, SOON, Site, Terms},
};
use masque::tunnel::Form;
use rustix::{
    pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use super::{VOICE, connect};

/// An emulated terminal of 80×24, and the program that runs in it.
struct Terminal {
    screen: Arc<Mutex<vt100::Parser>>,
    keys: File,
    program: Child,
}

impl Terminal {
    fn start(mut command: Command) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        unlockpt(&ours).unwrap();
        let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
        tcsetwinsize(&ours, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let end = || theirs.try_clone().unwrap();
        let program = command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(24.try_into().unwrap(), 80.try_into().unwrap(), 0)));
        let (mut shown, emulated) = (File::from(ours.try_clone().unwrap()), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading fails once the program and this process have closed the other end.
            while let Ok(read) = shown.read(&mut bytes) {
                emulated.lock().unwrap().process(&bytes[..read]);
            }
        });
        Self { screen, keys: ours.into(), program }
    }

    fn lines(&self) -> Vec<String> {
        self.screen.lock().unwrap().screen().rows(0, 80).collect()
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn wait_for(&self, what: &str, mut is_shown: impl FnMut(&[String]) -> bool) {
        let shown = || is_shown(&self.lines()).then_some(());
        wait_for(what, SOON, shown).unwrap_or_else(|error| panic!("{error:#}: {:#?}", self.lines()));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn top_shows_classes_and_tunnels_on_a_small_terminal_and_leaves_it_as_it_was() {
    lab::ring!(Netns);
    let site = Site::new(Terms { sections: VOICE, ..Terms::default() }).unwrap();
    let _echo = site.chain.target.echo(7).unwrap();
    let mut command = Command::new(lab::program("pacectl").unwrap());
    command.arg("--socket").arg(site.path("control.sock")).arg("top");
    site.client(async || {
        let mut tunnel = connect(&site).await.open(site.target(Family::V4, 7)).await.unwrap();
        let mut terminal = Terminal::start(command);
        let mut exchange = async || {
            tunnel.send(Form::Datagram, &[7; 1000]).await.unwrap();
            assert_eq!(tunnel.recv().await.unwrap().unwrap(), [7; 1000][..]);
        };
        exchange().await;
        let starts = |lines: &[String], part: &str| lines.iter().any(|line| line.starts_with(part));
        terminal.wait_for("both classes, the tunnel and its target", |lines| {
            starts(lines, "default") && starts(lines, "voice") && lines.iter().any(|line| line.contains("10.0.2."))
        });
        let lines = terminal.lines();
        assert!(lines[0].contains("revision 1") && lines[1].contains("1 connections  1 tunnels"), "{lines:#?}");
        assert!(lines[23].starts_with("q quit"), "{lines:#?}");
        let head = lines.iter().position(|line| line.starts_with("class ")).unwrap();
        let head = lines[head..head + 2].join(" ");
        for column in
            ["tunnels", "rate", "queue", "sojourn", "late", "payloads", "packets", "dropped", "expired", "streams"]
        {
            assert!(head.contains(column), "{column}: {head}");
        }
        terminal.press("?");
        terminal.wait_for("the meanings of the columns", |lines| {
            lines.iter().any(|line| line.contains("late packets     packets handed"))
        });
        terminal.press("?");
        terminal.wait_for("the tunnels to be shown again", |lines| lines.iter().any(|line| line.contains("10.0.2.")));
        terminal.press(" ");
        terminal.wait_for("top to pause", |lines| lines[0].contains("PAUSED"));
        terminal.press(" b");
        terminal.wait_for("top to continue", |lines| !lines[0].contains("PAUSED"));
        terminal.press("q");
        let ended = wait_for("the end of top", SOON, || terminal.program.try_wait().unwrap()).unwrap();
        assert!(ended.success(), "{ended}");
        terminal.wait_for("the previous screen", |lines| lines.iter().all(String::is_empty));
        let is_restored = || {
            let parser = terminal.screen.lock().unwrap();
            (!parser.screen().alternate_screen() && !parser.screen().hide_cursor()).then_some(())
        };
        wait_for("the previous screen and its cursor", SOON, is_restored).unwrap();
    })
    .unwrap();
}
