//! The cost of the kernel's programs for one packet, which the benchmark `bpf` measures: its rows and their table.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// The cost of one program for one kind of packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelCost {
    /// The program.
    pub program: String,
    /// The packet, and the outcome where it is not obvious.
    pub packet: String,
    /// The packet's address family: `IPv4` or `IPv6`.
    pub family: String,
    /// Nanoseconds per packet: the median of the runs. The kernel gives each run's mean over all its packets, rounded down.
    pub ns: u64,
    /// Nanoseconds per packet in the fastest run, which other work on the machine disturbed the least.
    pub least_ns: u64,
    /// How many packets each run has.
    pub packets: u32,
    /// How many runs there were.
    pub runs: usize,
}

/// Renders a table in Markdown: medians, with the fastest run in brackets, and a column for each address family.
#[must_use]
pub fn table(costs: &[KernelCost]) -> String {
    let mut table = String::from("| program | packet | IPv4, ns | IPv6, ns |\n|---|---|--:|--:|\n");
    let mut written = Vec::new();
    for KernelCost { program, packet, .. } in costs {
        if written.contains(&(program, packet)) {
            continue;
        }
        written.push((program, packet));
        let cell = |family: &str| {
            let of = |cost: &&KernelCost| (&cost.program, &cost.packet, &cost.family[..]) == (program, packet, family);
            costs.iter().find(of).map_or("–".to_owned(), |cost| format!("{} ({})", cost.ns, cost.least_ns))
        };
        _ = writeln!(table, "| {program} | {packet} | {} | {} |", cell("IPv4"), cell("IPv6"));
    }
    table
}

#[cfg(test)]
mod tests {
    use instruments::origin::{Origin, json_lines};

    use super::*;

    fn read(lines: &str) -> Vec<KernelCost> {
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn cost(packet: &str, family: &str, ns: u64) -> KernelCost {
        let [program, packet, family] = ["ingress", packet, family].map(str::to_owned);
        KernelCost { program, packet, family, ns, least_ns: ns - 1, packets: 10, runs: 3 }
    }

    #[test]
    fn a_packet_has_one_line_with_both_families_and_rows_name_their_origin() {
        let costs = [cost("a", "IPv4", 50), cost("a", "IPv6", 70), cost("b", "IPv4", 9)];
        let lines = json_lines(&costs, &Origin::of_this_run("wall").unwrap()).unwrap();
        assert!(lines.lines().all(|line| line.contains("\"kernel\":") && line.contains("\"trees\":")), "{lines}");
        assert_eq!(read(&lines), costs);
        let table = table(&costs);
        assert!(table.ends_with("| ingress | a | 50 (49) | 70 (69) |\n| ingress | b | 9 (8) | – |\n"), "{table}");
    }

    #[test]
    fn the_readme_has_the_table_of_the_rows_of_the_kernels_programs() {
        let read_file = |file| std::fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let (readme, costs) = (read_file("README.md"), read(&read_file("results/bpf.json")));
        let (_, rest) = readme.split_once("<!-- cargo bench -p perf --bench bpf -->\n\n").unwrap();
        let (written, _) = rest.split_once("\n<!-- end of the table -->").unwrap();
        assert!(written == table(&costs), "write this table of results/bpf.json:\n{}", table(&costs));
    }
}
