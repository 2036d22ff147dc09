//! The processes of a soak: starts, finds and kills them, and reads the memory and descriptors that they hold.

use std::collections::VecDeque;
use std::fs;

use lab::process::{Process, send_signal};
use lab::site::{Family, Site};

/// The maximum growth of a process's memory and descriptors between the first quarter of its life and its death. A
/// short life is mostly start-up.
const GROWTH_KIB: u64 = 2_048;
const GROWTH_OF_SHORT_LIFE_KIB: u64 = 16_384;
const SHORT_LIFE_S: usize = 60;
const GROWTH_DESCRIPTORS: u64 = 48;

pub fn start_edge(site: &Site) -> Process {
    let folder = site.path("").display().to_string();
    let text = format!(
        "state_dir = \"{folder}\"\n[[forward]]\nlisten = \"127.0.0.1:5001\"\nrelay = \"{}\"\ntarget = \"10.0.2.2:7\"\n\
         ca = \"{folder}/authority.pem\"\n[[forward]]\nlisten = \"127.0.0.1:5002\"\nprotocol = \"tcp\"\n\
         relay = \"{}\"\ntarget = \"10.0.2.2:7\"\nca = \"{folder}/authority.pem\"\n[control]\nsocket = \"{folder}/edge.sock\"\n",
        site.template(Family::V4),
        site.template(Family::V4)
    );
    let file = site.write("edge.toml", &text).unwrap();
    site.chain.client.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap()
}

/// The only child of a process, if it has one.
pub fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.trim().parse().ok()
}

pub fn monitor_of(relay: &Process) -> Option<u32> {
    child_of(child_of(relay.id())?)
}

pub fn kill(pid: u32) {
    send_signal(pid, libc::SIGKILL).unwrap();
}

/// A process's memory in KiB, and its number of descriptors.
pub fn held_by(pid: u32) -> Option<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    Some((memory.trim().trim_end_matches(" kB").parse().ok()?, descriptors))
}

/// One process from its start to its end: its memory and descriptors, each second.
#[derive(Default)]
pub struct Life {
    held: VecDeque<(u64, u64)>,
}

impl Life {
    pub fn note(&mut self, pid: u32) {
        self.held.extend(held_by(pid));
    }

    /// Asserts that the process holds no more at the end than after its first quarter, and begins another life.
    pub fn end(&mut self, of: &str) {
        let held = std::mem::take(&mut self.held);
        let (Some(early), Some(late)) = (held.get(held.len() / 4), held.back()) else { return };
        println!("{of}: {early:?} (KiB, descriptors) grew to {late:?} in {} s", held.len());
        let growth_kib = if held.len() < SHORT_LIFE_S { GROWTH_OF_SHORT_LIFE_KIB } else { GROWTH_KIB };
        assert!(late.0 < early.0 + growth_kib && late.1 < early.1 + GROWTH_DESCRIPTORS, "{of} grows: {held:?}");
    }
}
