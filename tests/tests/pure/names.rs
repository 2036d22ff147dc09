//! Finds types of the product that have the same name. A name has one meaning: the name of a public type occurs once in all
//! crates. The name of a type that is visible only within its crate occurs once among the types visible there. Types private to
//! a module may have any name.
//!
//! `cargo test --workspace --test pure names:: -- --nocapture` prints the numbers of types and names.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::arrows::{crates, files, is_test};

/// Names that several types may have, and why. The list may only become shorter: rename a type whose name is already
/// taken.
const SHARED: &[(&str, &str)] = &[
    (
        "Arguments",
        "what clap reads for one command of `pacectl`, whose module has the command's name (`probe::Arguments`)",
    ),
    ("Command", "what clap reads as the command after `pacectl policy`, `route` or `token`, as `Arguments`"),
    (
        "Error",
        "the usual name in Rust for why all calls of a module fail, which callers write with the module (`bpf::Error`)",
    ),
];

/// Folders outside the product: plans of experiments use the product's names for the same things.
const OUTSIDE: [&str; 2] = ["perf", "tests"];

/// A type that is visible outside its module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Type {
    name: String,
    /// The folder of its crate.
    of: String,
    file: String,
    /// Whether it is `pub`, and not `pub(crate)` or the like.
    is_public: bool,
}

/// Whether a type is `pub` (`true`), or `pub(crate)` or the like (`false`). `None` if it is private to its module.
fn reach(visibility: &syn::Visibility) -> Option<bool> {
    match visibility {
        syn::Visibility::Public(_) => Some(true),
        syn::Visibility::Restricted(_) => Some(false),
        syn::Visibility::Inherited => None,
    }
}

/// Adds the types defined in a file or in a module of it. `place` is the crate and the file.
fn types(items: &[syn::Item], place: (&str, &str), found: &mut Vec<Type>) {
    for item in items {
        let (reach, name) = match item {
            syn::Item::Struct(item) => (reach(&item.vis), item.ident.to_string()),
            syn::Item::Enum(item) => (reach(&item.vis), item.ident.to_string()),
            syn::Item::Trait(item) => (reach(&item.vis), item.ident.to_string()),
            syn::Item::Type(item) => (reach(&item.vis), item.ident.to_string()),
            // `config` defines enums of keywords with a macro.
            syn::Item::Macro(item) if item.mac.path.is_ident("words") => {
                let tokens = item.mac.tokens.to_string();
                let Some((_, rest)) = tokens.split_once("pub enum ") else { continue };
                (Some(true), rest.split_whitespace().next().unwrap().to_owned())
            }
            syn::Item::Mod(item) if !is_test(&item.attrs) => {
                types(item.content.as_ref().map_or(&[], |(_, items)| items), place, found);
                continue;
            }
            _ => continue,
        };
        if let Some(is_public) = reach {
            found.push(Type { name, of: place.0.to_owned(), file: place.1.to_owned(), is_public });
        }
    }
}

/// The names shared by several of these types, and the files that define them.
fn shared(types: &[Type]) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut shared = BTreeMap::<_, BTreeSet<_>>::new();
    for (place, one) in types.iter().enumerate() {
        for other in &types[place + 1..] {
            if one.name == other.name && (one.of == other.of || one.is_public && other.is_public) {
                shared.entry(&one.name[..]).or_default().extend([&one.file[..], &other.file[..]]);
            }
        }
    }
    shared
}

#[test]
fn a_name_belongs_to_one_type() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = Vec::new();
    for of in crates(root) {
        let name = of.trim_end_matches("/src");
        if OUTSIDE.iter().any(|folder| Path::new(name).starts_with(folder)) {
            continue;
        }
        for file in files(&root.join(&of)) {
            let ast = syn::parse_file(&fs::read_to_string(&file).unwrap()).unwrap();
            types(&ast.items, (name, file.strip_prefix(root).unwrap().to_str().unwrap()), &mut found);
        }
    }
    let names: BTreeSet<_> = found.iter().map(|found| &found.name[..]).collect();
    let mut shared = shared(&found);
    println!("{} types, {} names, of which {} are shared", found.len(), names.len(), shared.len());
    assert!(found.len() > 700, "only {} types: are all sources found?", found.len());
    let gone: Vec<_> = SHARED.iter().filter(|(name, _)| shared.remove(name).is_none()).collect();
    assert!(shared.is_empty(), "several types have one name; rename all but one of each: {shared:#?}");
    assert!(gone.is_empty(), "no longer shared; remove them from the list: {gone:?}");
}

#[test]
fn types_share_a_name_where_one_reader_can_meet_both() {
    let sources = [
        ("a", "a/x.rs", "pub struct Clock; pub(crate) struct Queue; struct Step; pub(super) enum Turn {}"),
        ("a", "a/y.rs", "pub(super) trait Queue {} struct Step; pub struct Turn;"),
        (
            "b",
            "b/z.rs",
            "mod inner { pub type Clock = u8; pub struct Queue; } #[cfg(test)] mod tests { pub struct Turn; }",
        ),
    ];
    let mut found = Vec::new();
    for (of, file, text) in sources {
        types(&syn::parse_file(text).unwrap().items, (of, file), &mut found);
    }
    // `Step` is private. Neither `Queue` of `a` is public, so a reader of `b` does not meet it.
    let expected = [("Clock", ["a/x.rs", "b/z.rs"]), ("Queue", ["a/x.rs", "a/y.rs"]), ("Turn", ["a/x.rs", "a/y.rs"])];
    assert_eq!(shared(&found), expected.map(|(name, files)| (name, BTreeSet::from(files))).into());
}
