//! Which public types of different crates have the same name. A name has one meaning, but for those that stand in `SHARED`.

#![expect(clippy::unwrap_used, reason = "what tests share ends them as they end themselves")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::arrows::{crates, files};

/// Names that several crates of the product give to their types. Nobody meets two of the same name unless by their modules
/// (`h3::Error`, `bpf::Error`), or they lie in crates that do not know of each other. The list may only become shorter: a
/// type whose name another crate has gets a name of its own.
const SHARED: &[&str] =
    &["Caller", "Client", "Error", "Events", "Listener", "Refusal", "Seat", "Told", "Tunnel", "Waiting"];

/// Folders of what is no part of the product: plans of experiments speak of what the product has, by the same names.
const OUTSIDE: [&str; 2] = ["perf", "tests"];

/// The public types that a file defines.
fn types(file: &Path) -> Vec<String> {
    let ast = syn::parse_file(&fs::read_to_string(file).unwrap()).unwrap();
    let public = |visibility: &syn::Visibility| matches!(visibility, syn::Visibility::Public(_));
    let name = |item: &syn::Item| match item {
        syn::Item::Struct(item) => public(&item.vis).then(|| item.ident.to_string()),
        syn::Item::Enum(item) => public(&item.vis).then(|| item.ident.to_string()),
        syn::Item::Trait(item) => public(&item.vis).then(|| item.ident.to_string()),
        syn::Item::Type(item) => public(&item.vis).then(|| item.ident.to_string()),
        // Enums of words are made by a macro of `config`.
        syn::Item::Macro(item) if item.mac.path.is_ident("words") => item
            .mac
            .tokens
            .to_string()
            .split_once("pub enum ")
            .and_then(|(_, rest)| rest.split_whitespace().next().map(str::to_owned)),
        _ => None,
    };
    ast.items.iter().filter_map(name).collect()
}

#[test]
fn a_types_name_belongs_to_one_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut crates_of = BTreeMap::<String, BTreeSet<String>>::new();
    for of in crates(root) {
        let name = of.trim_end_matches("/src");
        if OUTSIDE.iter().any(|folder| Path::new(name).starts_with(folder)) {
            continue;
        }
        for defined in files(&root.join(&of)).iter().flat_map(|file| types(file)) {
            crates_of.entry(defined).or_default().insert(name.to_owned());
        }
    }
    assert!(crates_of.len() > 400, "sources are found and read: {}", crates_of.len());
    let shared: BTreeSet<_> = crates_of.iter().filter(|(_, crates)| crates.len() > 1).collect();
    let new: Vec<_> = shared.iter().filter(|(name, _)| !SHARED.contains(&name.as_str())).collect();
    assert!(new.is_empty(), "name these otherwise: {new:#?}");
    let shared: BTreeSet<_> = shared.iter().map(|(name, _)| name.as_str()).collect();
    let gone: Vec<_> = SHARED.iter().filter(|name| !shared.contains(**name)).collect();
    assert!(gone.is_empty(), "no longer shared, so that they leave the list: {gone:?}");
}
