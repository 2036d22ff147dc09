//! The processes of a soak: starts, finds and kills them, and reads the memory and descriptors that they hold.

use std::collections::VecDeque;

use lab::{
    process::{Held, Process, child_of, send_signal},
    site::{Family, Site},
};

/// The maximum growth of a process's memory and descriptors between the first quarter of its life and its death. A
/// short life is mostly start-up.
const GROWTH_KIB: u64 = 2_048;
const GROWTH_OF_SHORT_LIFE_KIB: u64 = 16_384;
const SHORT_LIFE_S: usize = 60;
const GROWTH_DESCRIPTORS: u64 = 48;

pub fn start_edge(site: &Site) -> Process {
    let folder = site.path("").display().to_string();
    let text = format!(
        "state_dir = \"{folder}/edge\"\n[[forward]]\nlisten = \"127.0.0.1:5001\"\nrelay = \"{}\"\ntarget = \"10.0.2.2:7\"\n\
         ca = \"{folder}/authority.pem\"\n[[forward]]\nlisten = \"127.0.0.1:5002\"\nprotocol = \"tcp\"\n\
         relay = \"{}\"\ntarget = \"10.0.2.2:7\"\nca = \"{folder}/authority.pem\"\n[control]\nsocket = \"{folder}/edge.sock\"\n",
        site.template(Family::V4),
        site.template(Family::V4)
    );
    let file = site.write("edge.toml", &text).unwrap();
    site.chain.client.start(lab::program("paced").unwrap(), ["run".into(), "--config".into(), file]).unwrap()
}

pub fn monitor_of(relay: &Process) -> Option<u32> {
    child_of(child_of(relay.id())?)
}

pub fn kill(pid: u32) {
    send_signal(pid, libc::SIGKILL).unwrap();
}

/// One process from its start to its end: its memory and descriptors, each second.
#[derive(Default)]
pub struct Life {
    held: VecDeque<Held>,
}

impl Life {
    pub fn note(&mut self, pid: u32) {
        self.held.extend(Held::by(pid));
    }

    /// Asserts that the process holds no more at the end than after its first quarter, and begins another life.
    pub fn end(&mut self, of: &str) {
        let held = std::mem::take(&mut self.held);
        let (Some(early), Some(late)) = (held.get(held.len() / 4), held.back()) else { return };
        println!("{of}: {early:?} grew to {late:?} in {} s", held.len());
        let growth_kib = if held.len() < SHORT_LIFE_S { GROWTH_OF_SHORT_LIFE_KIB } else { GROWTH_KIB };
        let is_flat = late.kib < early.kib + growth_kib && late.descriptors < early.descriptors + GROWTH_DESCRIPTORS;
        assert!(is_flat, "{of} grows: {held:?}");
    }
}
