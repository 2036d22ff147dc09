//! Records which modules use which: in every crate, sibling modules use each other in one direction only.
//!
//! `cargo test --workspace --test pure arrows:: -- --nocapture` prints all arrows, as `A -> B`.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};

/// The source folders of all crates that the workspace lists as members.
pub fn crates(root: &Path) -> Vec<String> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let (_, members) = manifest.split_once("\nmembers = [").unwrap();
    let (members, _) = members.split_once(']').unwrap();
    members
        .split('"')
        .skip(1)
        .step_by(2)
        .map(|member| format!("{member}/src"))
        .filter(|of| root.join(of).exists())
        .collect()
}

/// A module: the path of names from the crate's root.
type Module = Vec<String>;

/// The modules of a crate and the paths that they use.
#[derive(Default)]
struct Uses {
    modules: BTreeSet<Module>,
    /// A module, and a path in the crate that it names.
    named: Vec<(Module, Module)>,
}

impl Uses {
    fn of(root: &Path) -> Self {
        let mut uses = Self::default();
        let mut asts = Vec::new();
        for file in files(root) {
            let relative = file.strip_prefix(root).unwrap().with_extension("");
            let mut module: Module = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if matches!(module.last().map(String::as_str), Some("lib" | "main" | "mod")) {
                module.pop();
            }
            uses.modules.insert(module.clone());
            asts.push((module, syn::parse_file(&fs::read_to_string(&file).unwrap()).unwrap()));
        }
        for (module, ast) in asts {
            Reader { module, uses: &mut uses }.visit_file(&ast);
        }
        uses
    }

    /// The arrows between modules with the same parent.
    fn arrows(&self) -> BTreeSet<(Module, Module)> {
        let mut arrows = BTreeSet::new();
        for (from, path) in &self.named {
            let known = (1..=path.len()).rev().map(|len| &path[..len]).find(|module| self.modules.contains(*module));
            let Some(to) = known else { continue };
            let shared = from.iter().zip(to).take_while(|(here, there)| here == there).count();
            if shared < from.len() && shared < to.len() {
                arrows.insert((from[..=shared].to_vec(), to[..=shared].to_vec()));
            }
        }
        arrows
    }
}

/// All source files below a crate's source folder, except unit tests.
pub fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.file_name().unwrap().to_str().unwrap() {
            "tests" | "tests.rs" => {}
            _ if path.is_dir() => found.extend(files(&path)),
            name if name.ends_with(".rs") => found.push(path),
            _ => {}
        }
    }
    found
}

/// Records the paths that one file names.
struct Reader<'a> {
    module: Module,
    uses: &'a mut Uses,
}

impl Reader<'_> {
    fn note(&mut self, path: &[String]) {
        let mut base = self.module.clone();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => (base, rest) = (Vec::new(), &path[1..]),
            Some("self") => rest = &path[1..],
            Some("super") => {
                while rest.first().is_some_and(|name| name == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            // A path that starts at a child module or at another crate.
            _ => {}
        }
        base.extend_from_slice(rest);
        self.uses.named.push((self.module.clone(), base));
    }

    fn note_tree(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.note_tree(&path.tree, &with(&path.ident)),
            syn::UseTree::Name(name) => self.note(&with(&name.ident)),
            syn::UseTree::Rename(name) => self.note(&with(&name.ident)),
            syn::UseTree::Glob(_) => self.note(before),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.note_tree(tree, before)),
        }
    }
}

/// Whether an item is compiled for unit tests only.
pub fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg") && attribute.parse_args::<syn::Ident>().is_ok_and(|of| of == "test")
    })
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test(&item.attrs) {
            self.note_tree(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if matches!(&names[0][..], "crate" | "self" | "super") && names.len() > 1 {
            self.note(&names);
        }
        visit::visit_path(self, path);
    }
}

/// Returns a path along the arrows from a module back to itself, if there is one.
fn circle(arrows: &BTreeMap<&str, Vec<&str>>) -> Option<Vec<String>> {
    fn walk<'a>(
        at: &'a str,
        arrows: &BTreeMap<&'a str, Vec<&'a str>>,
        way: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<String>> {
        if let Some(first) = way.iter().position(|module| *module == at) {
            return Some(way[first..].iter().chain([&at]).map(|module| (*module).to_owned()).collect());
        }
        if !done.insert(at) {
            return None;
        }
        way.push(at);
        let found = arrows.get(at).into_iter().flatten().find_map(|to| walk(to, arrows, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    arrows.keys().find_map(|module| walk(module, arrows, &mut Vec::new(), &mut done))
}

#[test]
fn modules_beside_each_other_use_each_other_in_one_direction() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut arrows = BTreeSet::new();
    for of in crates(root) {
        let name = |module: Module| format!("{of}/{}", module.join("/"));
        arrows.extend(Uses::of(&root.join(&of)).arrows().into_iter().map(|(from, to)| (name(from), name(to))));
    }
    arrows.iter().for_each(|(from, to)| println!("{from} -> {to}"));
    assert!(arrows.len() > 200, "only {} arrows: are all sources found?", arrows.len());
    let mut by_module = BTreeMap::<_, Vec<_>>::new();
    arrows.iter().for_each(|(from, to)| by_module.entry(&from[..]).or_default().push(&to[..]));
    assert_eq!(
        circle(&by_module),
        None,
        "modules use each other in a circle; move what they share to a module below both"
    );
}

#[test]
fn a_circle_is_found_wherever_it_begins() {
    let arrows = BTreeMap::from([("a", vec!["b"]), ("b", vec!["c", "d"]), ("d", vec!["e"]), ("e", vec!["b"])]);
    assert_eq!(circle(&arrows), Some(["b", "d", "e", "b"].map(str::to_owned).to_vec()));
    assert_eq!(circle(&BTreeMap::from([("a", vec!["b", "c"]), ("b", vec!["c"])])), None);
}
