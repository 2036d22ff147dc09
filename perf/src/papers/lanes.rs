//! How many cells run at the same time.

use std::{fs, num::NonZero, thread::available_parallelism};

use plan::Clock;

use super::{Cell, cell::SIMULATED};

/// The memory of a cell: the lab's guest has 4 GiB, and its emulator needs some more.
const CELL_KIB: u64 = 5 << 20;

/// Cells that run at the same time, one for each CPU, where this does not change their figures.
///
/// The lab and the simulators have a time of their own and use one CPU. Cells on the simulated network use all CPUs by themselves,
/// and cells on the machine's own clock need an idle machine, so both run alone.
#[derive(Debug)]
pub struct Lanes {
    all: usize,
    taken: usize,
}

impl Lanes {
    /// Returns as many lanes as this machine has CPUs and free memory for.
    pub fn of_this_machine() -> Self {
        let cpus = available_parallelism().map_or(1, NonZero::get);
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self::new(cpus, available_kib(&memory))
    }

    /// Returns a lane for each CPU, but no more than there is memory for, if it is known; at least one.
    fn new(cpus: usize, available_kib: Option<u64>) -> Self {
        let of_memory = available_kib.map_or(cpus, |kib| usize::try_from(kib / CELL_KIB).unwrap_or(cpus));
        Self { all: cpus.min(of_memory).max(1), taken: 0 }
    }

    /// Whether a cell can begin beside those that run.
    pub fn has_room(&self, cell: &Cell) -> bool {
        self.taken + self.of(cell) <= self.all
    }

    /// Takes the lanes of a cell that begins.
    pub fn take(&mut self, cell: &Cell) {
        self.taken += self.of(cell);
    }

    /// Frees the lanes of a cell that has ended.
    pub fn free(&mut self, cell: &Cell) {
        self.taken -= self.of(cell);
    }

    /// Returns which part of the machine's lanes a cell takes: the share of its duration by which it delays all others.
    pub fn share(&self, cell: &Cell) -> f64 {
        self.of(cell) as f64 / self.all as f64
    }

    fn of(&self, cell: &Cell) -> usize {
        if cell.clock == SIMULATED || cell.clock == Clock::Lab.name() { 1 } else { self.all }
    }
}

/// Reads the available memory from the text of `/proc/meminfo`.
fn available_kib(memory: &str) -> Option<u64> {
    memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(clock: &str) -> Cell {
        Cell::of_test("base", clock)
    }

    #[test]
    fn cells_with_a_time_of_their_own_run_side_by_side_and_others_alone() {
        let [lab, simulated, network, native] = ["lab", SIMULATED, "virtual-network", "native"].map(cell);
        let mut lanes = Lanes::new(2, None);
        lanes.take(&lab);
        assert!(lanes.has_room(&simulated) && !lanes.has_room(&network) && !lanes.has_room(&native));
        lanes.take(&simulated);
        assert!(!lanes.has_room(&lab));
        lanes.free(&lab);
        lanes.free(&simulated);
        lanes.take(&network);
        assert!(!lanes.has_room(&lab) && !lanes.has_room(&simulated));
        assert_eq!([&lab, &native].map(|cell| lanes.share(cell)), [0.5, 1.0]);
    }

    #[test]
    fn there_are_no_more_lanes_than_memory_for_guests() {
        let lanes = |cpus, available| Lanes::new(cpus, available_kib(available)).all;
        let of_16_gib = "MemTotal:       24000000 kB\nMemAvailable:   16777216 kB\nCached: 1 kB\n";
        assert_eq!([lanes(2, of_16_gib), lanes(64, of_16_gib)], [2, 3]);
        assert_eq!(lanes(64, "MemAvailable: 100 kB"), 1, "one runs in any case");
        assert_eq!(lanes(4, "no such line"), 4);
    }
}
