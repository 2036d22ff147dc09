//! The kernel's arithmetic of departure times equals that of `sched::pace`.

use sched::pace::Pace;

#[link(name = "edt", kind = "static")]
unsafe extern "C" {
    /// `edt_pace.c`.
    fn edt_send(next_ns: *mut u64, ready_ns: u64, bytes: u64, bytes_per_sec: u64, burst_ns: u64) -> u64;
    fn edt_horizon_ns() -> u64;
}

/// Pseudo-random numbers, the same in every run (xorshift, Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// A number spread evenly over the orders of magnitude, up to 2^`bits`.
    fn of_any_size(&mut self, bits: u64) -> u64 {
        let bound = 1 << self.below(bits);
        bound + self.below(bound)
    }
}

#[test]
fn the_loader_knows_how_far_ahead_the_program_lets_packets_depart() {
    // SAFETY: it takes nothing and returns a number.
    assert_eq!(unsafe { edt_horizon_ns() }, bpf::egress::HORIZON_NS);
}

#[test]
fn a_million_packets_depart_in_the_kernel_when_sched_says() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut packets, mut waited) = (0, 0);
    while packets < 1_000_000 {
        let (bytes_per_sec, burst_ns) = (random.of_any_size(37), random.below(2) * random.of_any_size(30));
        // About the time that a packet takes on average, so that the class is sometimes idle and sometimes behind.
        let gap_ns = (16_000_000_000_000 / bytes_per_sec).max(1);
        let (mut pace, mut next_ns, mut ready_ns) = (Pace::new(bytes_per_sec, burst_ns), 0, random.of_any_size(60));
        for _ in 0..1_000 {
            ready_ns += random.below(2 * gap_ns);
            // The clocks of two CPUs may differ.
            let ready_ns = ready_ns.saturating_sub(random.below(gap_ns));
            let bytes = random.of_any_size(17);
            let expected_ns = pace.ready_at(ready_ns);
            pace.sent(ready_ns, bytes);
            // SAFETY: the function accesses only its arguments, and `next_ns` outlives the call.
            let departure_ns = unsafe { edt_send(&raw mut next_ns, ready_ns, bytes, bytes_per_sec, burst_ns) };
            assert_eq!(departure_ns, expected_ns, "{bytes} bytes at {bytes_per_sec} bytes/s, burst {burst_ns} ns");
            waited += u64::from(departure_ns > ready_ns);
            packets += 1;
        }
    }
    assert!(
        (packets / 10..packets * 9 / 10).contains(&waited),
        "both cases must be common: {waited} of {packets} waited"
    );
}
