//! The compiled XDP program, and its name.

/// The compiled program with its maps, as an ELF object that libbpf and `bpftool prog loadall` accept as well.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ingress.bpf.o"));

/// The program's name, as `bpftool prog` and `ip link` show it.
pub const PROGRAM: &str = "paced_ingress";
