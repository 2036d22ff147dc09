//! Counts the allocations of one thread, and its copies of a marked payload, by the crate whose code asked for them.
//!
//! The allocator and `memcpy` are those of the whole executable. While a thread counts, each allocation and each copy that contains the
//! payload looks at the stack: the innermost frame of a crate that [`Owner`] knows is the owner. Frames of the standard library and of other
//! libraries are passed over, so paced also owns what it asks them to do.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    cell::{Cell, RefCell},
    collections::HashMap,
    ffi::{c_int, c_void},
    hint::black_box,
};

/// The size of the payloads whose copies are counted.
pub const PAYLOAD_BYTES: usize = 1_100;

/// The first bytes of such a payload.
const MARK: [u8; 16] = *b"a marked payload";

/// How many frames tell one stack from another: the inner ones, as far as the parts of the transport that call paced.
const FRAMES: usize = 40;

/// The payload whose copies are counted.
pub fn payload() -> Vec<u8> {
    MARK.into_iter().chain((MARK.len()..PAYLOAD_BYTES).map(|at| (at * 31) as u8)).collect()
}

/// What a stack asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    /// An allocation, or a reallocation.
    Allocation,
    /// A copy of a payload in plain text; a copy of several payloads counts as several.
    Copy,
}

/// The code that allocates or copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// paced's own crates.
    Paced,
    /// s2n-quic and TLS.
    Transport,
    /// The simulated network and its executor.
    Network,
    /// This test, and everything that no other owner has called.
    Test,
}

impl Owner {
    /// The owner of a crate; `None` for libraries that work for their callers.
    fn of_crate(name: &str) -> Option<Self> {
        match name {
            "admission" | "config" | "masque" | "pacing" | "quic" | "relay" | "relay_client" | "role" | "sched" => {
                Some(Self::Paced)
            }
            "bach" | "s2n_quic_platform" => Some(Self::Network),
            "rustls" | "aws_lc_rs" => Some(Self::Transport),
            _ if name.starts_with("s2n_") => Some(Self::Transport),
            "allocations" | "lab" => Some(Self::Test),
            _ => None,
        }
    }
}

/// What one stack asked for.
pub struct Site {
    /// What.
    pub act: Act,
    /// How often.
    pub count: u64,
    /// Whose code it is.
    pub owner: Owner,
    /// The functions of paced on the stack, from the innermost.
    pub functions: Vec<String>,
}

thread_local! {
    static COUNTS: Cell<bool> = const { Cell::new(false) };
    /// Whether the thread is about to note something, which allocates and copies.
    static NOTES: Cell<bool> = const { Cell::new(false) };
    static STACKS: RefCell<HashMap<(Act, u64), (u64, Backtrace)>> = RefCell::default();
}

/// Begins to count on this thread.
pub fn begin() {
    STACKS.with_borrow_mut(HashMap::clear);
    COUNTS.set(true);
}

/// Ends counting on this thread; returns what it found, the most frequent first.
pub fn end() -> Vec<Site> {
    COUNTS.set(false);
    let stacks = STACKS.with_borrow_mut(std::mem::take);
    let mut sites: Vec<_> =
        stacks.into_iter().map(|((act, _), (count, stack))| Site::new(act, count, &stack)).collect();
    sites.sort_by_key(|site| std::cmp::Reverse(site.count));
    sites
}

impl Site {
    fn new(act: Act, count: u64, stack: &Backtrace) -> Self {
        let text = format!("{stack:#}");
        let frames = frames(&text);
        // The frames of the counter itself come first.
        let own = frames.iter().rposition(Frame::counts).map_or(0, |at| at + 1);
        let owned: Vec<_> = frames[own..].iter().filter_map(|frame| Some((frame.owner()?, frame.name))).collect();
        let owner = owned.first().map_or(Owner::Test, |(owner, _)| *owner);
        let paced = owned.into_iter().filter(|(owner, _)| *owner == Owner::Paced);
        let functions = paced.map(|(_, name)| name.to_owned()).collect();
        Self { act, count, owner, functions }
    }
}

/// A line of a printed stack with a function, and the file that the line below names.
struct Frame<'a> {
    name: &'a str,
    /// `None` for crates without debug information.
    file: Option<&'a str>,
}

/// The frames of a stack printed with `{:#}`, from the innermost.
fn frames(text: &str) -> Vec<Frame<'_>> {
    let mut frames = Vec::<Frame>::new();
    for line in text.lines().map(str::trim_start) {
        if let Some(file) = line.strip_prefix("at ") {
            if let Some(frame) = frames.last_mut() {
                frame.file = Some(file);
            }
            continue;
        }
        let numbered = line.split_once(": ").filter(|(number, _)| number.bytes().all(|byte| byte.is_ascii_digit()));
        let name = numbered.map_or(line, |(_, rest)| rest.trim_start());
        // With `{:#}`, an address stands in front of the name.
        let name =
            name.split_once(" - ").filter(|(address, _)| address.starts_with("0x")).map_or(name, |(_, rest)| rest);
        frames.push(Frame { name, file: None });
    }
    frames
}

impl Frame<'_> {
    /// Whether the frame is one of this module's.
    fn counts(&self) -> bool {
        self.file.is_some_and(|file| file.contains("tests/tests/allocations/count.rs"))
    }

    /// The owner; `None` for libraries that work for their callers. With debug information, names of inlined functions lack their crate,
    /// so the file decides: a crate of the workspace lies in its tree, and another in a directory with its name and version.
    fn owner(&self) -> Option<Owner> {
        let Some(file) = self.file else { return Owner::of_crate(crate_of(self.name)) };
        let tree = concat!(env!("CARGO_MANIFEST_DIR"), "/../");
        let tree = tree.strip_suffix("tests/../").unwrap_or(tree);
        if let Some(path) = file.strip_prefix(tree) {
            return Some(if path.starts_with("tests/") { Owner::Test } else { Owner::Paced });
        }
        let package = |part: &str| {
            let (name, version) = part.rsplit_once('-')?;
            version
                .starts_with(|first: char| first.is_ascii_digit())
                .then(|| Owner::of_crate(&name.replace('-', "_")))?
        };
        file.split('/').find_map(package)
    }
}

/// The crate of a function, or of the type whose method it is.
fn crate_of(name: &str) -> &str {
    let mut name = name;
    while let Some(rest) =
        ["<", "&", "*", "(", "[", "mut ", "const ", "dyn ", "impl "].iter().find_map(|start| name.strip_prefix(start))
    {
        name = rest;
    }
    name.split_once("::").map_or(name, |(first, _)| first)
}

fn note(act: Act, count: u64) {
    if !COUNTS.get() || NOTES.replace(true) {
        return;
    }
    let stack = hash_of_stack();
    STACKS.with_borrow_mut(|stacks| {
        let (sum, _) = stacks.entry((act, stack)).or_insert_with(|| (0, Backtrace::force_capture()));
        *sum += count;
    });
    NOTES.set(false);
}

/// What libgcc and LLVM's libunwind share of their interface; the standard library links one of them.
mod unwind {
    use super::{c_int, c_void};

    pub type Context = c_void;

    unsafe extern "C" {
        pub fn _Unwind_Backtrace(
            trace: unsafe extern "C" fn(*mut Context, *mut c_void) -> c_int,
            argument: *mut c_void,
        ) -> c_int;
        pub fn _Unwind_GetIP(context: *mut Context) -> usize;
    }
}

struct StackHash {
    hash: u64,
    frames: usize,
}

fn hash_of_stack() -> u64 {
    unsafe extern "C" fn frame(context: *mut unwind::Context, hash: *mut c_void) -> c_int {
        const GO_ON: c_int = 0;
        const END: c_int = 5;
        // SAFETY: `hash` is the argument below, and the unwinder passes a valid context.
        let (hash, at) = unsafe { (&mut *hash.cast::<StackHash>(), unwind::_Unwind_GetIP(context)) };
        // FNV-1a, by words.
        hash.hash = (hash.hash ^ at as u64).wrapping_mul(0x100_0000_01b3);
        hash.frames += 1;
        if hash.frames < FRAMES { GO_ON } else { END }
    }
    let mut hash = StackHash { hash: 0xcbf2_9ce4_8422_2325, frames: 0 };
    // SAFETY: the callback gets a pointer to `hash`, which lives longer than the call.
    _ = unsafe { unwind::_Unwind_Backtrace(frame, (&raw mut hash).cast()) };
    hash.hash
}

/// The system's allocator, which notes allocations.
struct Noting;

#[global_allocator]
static ALLOCATOR: Noting = Noting;

// SAFETY: every call is forwarded unchanged to the system's allocator; a note is made before, and allocates without noting.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(Act::Allocation, 1);
        // SAFETY: the caller keeps the trait's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note(Act::Allocation, 1);
        // SAFETY: as above.
        unsafe { System.realloc(place, layout, new_size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }
}

unsafe extern "C" {
    // The C library's own copies, which check that `room` bytes are there. The functions below cannot call what they replace.
    fn __memcpy_chk(to: *mut c_void, from: *const c_void, bytes: usize, room: usize) -> *mut c_void;
    fn __memmove_chk(to: *mut c_void, from: *const c_void, bytes: usize, room: usize) -> *mut c_void;
}

/// Copies as the C library does, and notes payloads.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void {
    // SAFETY: the caller keeps the contract of the C library. The bound is hidden because the compiler would make the call one of
    // `memcpy` again.
    unsafe {
        note_payloads(from, bytes);
        __memcpy_chk(to, from, bytes, black_box(usize::MAX))
    }
}

/// Copies as the C library does, and notes payloads.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void {
    // SAFETY: as above.
    unsafe {
        note_payloads(from, bytes);
        __memmove_chk(to, from, bytes, black_box(usize::MAX))
    }
}

/// Notes the payloads that are whole in a copy.
///
/// # Safety
/// `bytes` bytes at `from` can be read.
unsafe fn note_payloads(from: *const c_void, bytes: usize) {
    if bytes < PAYLOAD_BYTES || !COUNTS.get() || NOTES.get() {
        return;
    }
    // SAFETY: the caller says so.
    let copied = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    let (mut at, mut payloads) = (0, 0);
    while at + PAYLOAD_BYTES <= bytes {
        if copied[at..at + MARK.len()] == MARK {
            payloads += 1;
            at += PAYLOAD_BYTES;
        } else {
            at += 1;
        }
    }
    if payloads > 0 {
        note(Act::Copy, payloads);
    }
}
