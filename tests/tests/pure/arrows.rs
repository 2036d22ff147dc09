//! Records which modules use which: in every crate, files never use each other in a cycle, nor do sibling modules, each taken with
//! everything below it.
//!
//! A name that a module imports or re-exports counts as a name of the module that defines it. A module that only re-exports the names of
//! its children does not use them. Paths inside macros count, too. Globs would hide names, so only unit tests may use them. Methods are
//! not followed to the files with their `impl` blocks.
//!
//! `cargo test --workspace --test pure arrows:: -- --nocapture` prints all arrows between files, as `A -> B`.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use syn::{
    buffer::{Cursor, TokenBuffer},
    visit::{self, Visit},
};

/// The folders of all crates that the workspace lists as members.
pub fn members(root: &Path) -> Vec<String> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let (_, members) = manifest.split_once("\nmembers = [").unwrap();
    let (members, _) = members.split_once(']').unwrap();
    members.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The source folders of all crates that the workspace lists as members.
pub fn crates(root: &Path) -> Vec<String> {
    members(root).iter().map(|member| format!("{member}/src")).filter(|of| root.join(of).exists()).collect()
}

/// A module: the path of names from the crate's root.
type Module = Vec<String>;

/// The modules of a crate and the paths that they use.
#[derive(Default)]
struct Uses {
    modules: BTreeSet<Module>,
    /// A module, and a path in the crate that it names.
    named: Vec<(Module, Module)>,
    /// A module, and a name without a path in it: of an import, a variable, or something else.
    bare: Vec<(Module, Module)>,
    /// Names that modules import or re-export, each as a path in the crate, with the path that it stands for.
    imported: BTreeMap<Module, Module>,
    /// Modules with a glob import.
    globs: Vec<Module>,
}

impl Uses {
    fn of(root: &Path) -> Self {
        let texts = files(root).into_iter().map(|file| {
            let relative = file.strip_prefix(root).unwrap().with_extension("");
            let mut module: Module = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if matches!(module.last().map(String::as_str), Some("lib" | "main" | "mod")) {
                module.pop();
            }
            (module, fs::read_to_string(&file).unwrap())
        });
        Self::of_texts(texts)
    }

    /// Reads modules, each with the text of its file.
    fn of_texts(texts: impl IntoIterator<Item = (Module, String)>) -> Self {
        let mut uses = Self::default();
        for (module, text) in texts {
            uses.modules.insert(module.clone());
            Reader { module, uses: &mut uses }.visit_file(&syn::parse_file(&text).unwrap());
        }
        uses
    }

    /// Returns the module that defines what `path` names, as far as the crate's imports tell.
    fn defining(&self, path: &[String]) -> Option<Module> {
        /// More than any name is passed on; ends cycles of imports.
        const STEPS: usize = 16;
        let mut path = path.to_vec();
        for _ in 0..STEPS {
            let len = (1..=path.len()).rev().find(|len| self.modules.contains(&path[..*len])).unwrap_or_default();
            match path.get(..=len).and_then(|name| self.imported.get(name)) {
                Some(of) if *of != path[..=len] => path = [of, &path[len + 1..]].concat(),
                _ => return Some(path[..len].to_vec()),
            }
        }
        None
    }

    /// The arrows between files: from the module that names something to the one that defines it.
    fn between_files(&self) -> BTreeSet<(Module, Module)> {
        let imported = self.bare.iter().filter(|(_, path)| self.imported.contains_key(path));
        let arrows = self.named.iter().chain(imported);
        let arrows = arrows.filter_map(|(from, path)| Some((self.file_of(from), self.defining(path)?)));
        arrows.filter(|(from, to)| from != to).collect()
    }

    /// Returns the module that has a file of its own and holds `module`, which may be written inside another one.
    fn file_of(&self, module: &[String]) -> Module {
        let len = (1..=module.len()).rev().find(|len| self.modules.contains(&module[..*len])).unwrap_or_default();
        module[..len].to_vec()
    }

    /// The arrows between modules with the same parent.
    fn between_siblings(&self) -> BTreeSet<(Module, Module)> {
        let mut arrows = BTreeSet::new();
        for (from, to) in self.between_files() {
            let shared = from.iter().zip(&to).take_while(|(here, there)| here == there).count();
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
        let named = self.resolved(path);
        self.uses.named.push((self.module.clone(), named));
    }

    /// Notes a path that this module imports under a name. A module does not use its descendants by re-exporting what they define.
    fn note_import(&mut self, path: &[String], name: impl ToString, is_reexport: bool) {
        let name = [&self.module[..], &[name.to_string()]].concat();
        let of = self.resolved(path);
        if !(is_reexport && of.starts_with(&self.module)) {
            self.note(path);
        }
        self.uses.imported.insert(name, of);
    }

    /// Returns a path as one from the crate's root.
    fn resolved(&self, path: &[String]) -> Module {
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
        base
    }

    /// Notes the paths in the tokens of a macro, which may have any grammar.
    fn note_tokens(&mut self, mut at: Cursor<'_>) {
        while !at.eof() {
            if let Some((inside, _, _, after)) = at.any_group() {
                self.note_tokens(inside);
                at = after;
                continue;
            }
            let mut names = Vec::new();
            while let Some((name, after)) = at.ident() {
                names.push(name.to_string());
                at = after;
                let Some(next) = after_colons(at) else { break };
                at = next;
            }
            if matches!(names.first().map(String::as_str), Some("crate" | "self" | "super")) && names.len() > 1 {
                self.note(&names);
            }
            if names.is_empty() {
                at = at.token_tree().unwrap().1;
            }
        }
    }

    fn note_tree(&mut self, tree: &syn::UseTree, before: &[String], is_reexport: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.note_tree(&path.tree, &with(&path.ident), is_reexport),
            syn::UseTree::Name(name) if name.ident == "self" => match before.last() {
                Some(last) => self.note_import(before, last, is_reexport),
                None => self.note(before),
            },
            syn::UseTree::Name(name) => self.note_import(&with(&name.ident), &name.ident, is_reexport),
            syn::UseTree::Rename(name) if name.ident == "self" => self.note_import(before, &name.rename, is_reexport),
            syn::UseTree::Rename(name) => self.note_import(&with(&name.ident), &name.rename, is_reexport),
            syn::UseTree::Glob(_) => {
                self.uses.globs.push(self.module.clone());
                self.note(before);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.note_tree(tree, before, is_reexport));
            }
        }
    }
}

/// Returns the place behind `::`, if that comes next.
fn after_colons(at: Cursor<'_>) -> Option<Cursor<'_>> {
    let (first, at) = at.punct()?;
    let (second, at) = at.punct()?;
    (first.as_char() == ':' && second.as_char() == ':').then_some(at)
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
            self.note_tree(&item.tree, &[], !matches!(item.vis, syn::Visibility::Inherited));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        match &names[..] {
            [name] => {
                self.uses.bare.push((self.module.clone(), [&self.module[..], std::slice::from_ref(name)].concat()))
            }
            names => self.note(names),
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, of: &'ast syn::Macro) {
        self.note_tokens(TokenBuffer::new2(of.tokens.clone()).begin());
        visit::visit_macro(self, of);
    }
}

/// Returns a path along the arrows from a module back to itself, if there is one.
fn cycle(arrows: &BTreeMap<&str, Vec<&str>>) -> Option<Vec<String>> {
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

/// Returns the arrows as names, with the crate's folder before each module. The root module is `lib`.
fn named(of: &str, arrows: BTreeSet<(Module, Module)>) -> BTreeSet<(String, String)> {
    let name = |module: Module| format!("{of}/{}", if module.is_empty() { "lib".to_owned() } else { module.join("/") });
    arrows.into_iter().map(|(from, to)| (name(from), name(to))).collect()
}

/// Returns a path along `arrows` from a module back to itself, if there is one.
fn cycle_among(arrows: &BTreeSet<(String, String)>) -> Option<Vec<String>> {
    let mut by_module = BTreeMap::<_, Vec<_>>::new();
    arrows.iter().for_each(|(from, to)| by_module.entry(&from[..]).or_default().push(&to[..]));
    cycle(&by_module)
}

#[test]
fn files_and_modules_beside_each_other_use_each_other_in_one_direction() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut found, mut cycles) = (0, Vec::new());
    for of in crates(root) {
        let uses = Uses::of(&root.join(&of));
        assert_eq!(uses.globs, Vec::<Module>::new(), "{of}: name what these modules import");
        let between_files = named(&of, uses.between_files());
        between_files.iter().for_each(|(from, to)| println!("{from} -> {to}"));
        found += between_files.len();
        cycles.extend(cycle_among(&between_files));
        cycles.extend(cycle_among(&named(&of, uses.between_siblings())));
    }
    assert!(found > 400, "only {found} arrows: are all sources found?");
    assert_eq!(
        cycles,
        [] as [Vec<String>; 0],
        "modules use each other in a cycle; move what they share to a module below both"
    );
}

/// The modules of a small crate. Each line is a module and its text.
#[cfg(test)]
fn small(modules: &[(&str, &str)]) -> Uses {
    let path = |module: &str| module.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
    Uses::of_texts(modules.iter().map(|(module, text)| (path(module), (*text).to_owned())))
}

/// Arrows between modules, as `a -> b`.
#[cfg(test)]
fn written(arrows: &BTreeSet<(Module, Module)>) -> Vec<String> {
    arrows.iter().map(|(from, to)| format!("{} -> {}", from.join("::"), to.join("::"))).collect()
}

/// The arrows between modules of a small crate that have the same parent.
#[cfg(test)]
fn arrows_of(modules: &[(&str, &str)]) -> Vec<String> {
    written(&small(modules).between_siblings())
}

#[test]
fn a_file_uses_another_by_naming_what_it_defines_and_not_by_reexporting_it() {
    let (thing, up) = (("a", "pub struct Thing; pub fn thing() {}"), ("a", "use super::Own; pub struct Thing;"));
    for (root, child, expected) in [
        ("mod a; pub use a::Thing;", thing, &[][..]),
        ("mod a; use a::Thing;", thing, &[" -> a"]),
        ("mod a; pub use a::Thing; fn f(_: Thing) {}", thing, &[" -> a"]),
        ("mod a; fn f() { a::thing() }", thing, &[" -> a"]),
        ("mod a; fn f(a: u8) -> u8 { a }", thing, &[]),
        ("mod a; pub use a::Thing; pub struct Own;", up, &["a -> "]),
        ("mod a; use a::Thing; pub struct Own;", up, &[" -> a", "a -> "]),
        ("mod a; mod inner { pub(super) fn f(_: super::a::Thing) {} }", thing, &[" -> a"]),
    ] {
        assert_eq!(written(&small(&[("", root), child]).between_files()), expected, "{root}");
    }
}

#[test]
fn a_name_that_a_parent_passes_on_is_one_of_the_module_that_defines_it() {
    for import in ["pub use b::Thing;", "use b::Thing;", "pub(crate) use b::Thing;", "pub use self::b::{Thing};"] {
        assert_eq!(arrows_of(&[("", import), ("a", "use super::Thing;"), ("b", "")]), ["a -> b"], "{import}");
        assert_eq!(arrows_of(&[("", import), ("a", "fn f(_: crate::Thing) {}"), ("b", "")]), ["a -> b"]);
    }
    let renamed = [("", "pub use b::Thing as Other;"), ("a", "use super::Other;"), ("b", "")];
    assert_eq!(arrows_of(&renamed), ["a -> b"]);
    let far =
        [("", "pub use b::Thing;"), ("a", "use super::Thing;"), ("b", "pub use c::Thing;"), ("b::c", ""), ("b::d", "")];
    assert_eq!(arrows_of(&far), ["a -> b"]);
    let through_a_module = [("", "use b::c;"), ("a", "use super::c::Thing;"), ("b", ""), ("b::c", "")];
    assert_eq!(arrows_of(&through_a_module), ["a -> b"]);
    let with_itself = [("", "use b::c::{self, Thing};"), ("a", "use super::c::Other;"), ("b", ""), ("b::c", "")];
    assert_eq!(arrows_of(&with_itself), ["a -> b"]);
    let own = [("", "pub struct Thing;"), ("a", "use super::Thing;"), ("b", "use std::fmt;")];
    assert_eq!(arrows_of(&own), [""; 0]);
    let around = [("", "use a::Thing;"), ("a", "pub use super::Thing;"), ("b", "use super::Thing;")];
    assert_eq!(arrows_of(&around), [""; 0]);
}

#[test]
fn paths_in_macros_count() {
    for text in [
        "fn f() { tokio::select! { _ = super::b::wait() => {} } }",
        "fn f() { let _ = format!(\"{}\", vec![crate::b::LEN]); }",
        "macro_rules! m { () => { $crate::b::wait() } }",
    ] {
        assert_eq!(arrows_of(&[("", ""), ("a", text), ("b", "")]), ["a -> b"], "{text}");
    }
    assert_eq!(
        arrows_of(&[("", ""), ("a", "fn f() { println!(\"super::b {}\", self.b, x::b); }"), ("b", "")]),
        [""; 0]
    );
}

#[test]
fn globs_are_seen_outside_unit_tests_only() {
    let text = "use std::fmt; use super::*; #[cfg(test)] mod tests { use super::*; }";
    assert_eq!(Uses::of_texts([(vec!["a".to_owned()], text.to_owned())]).globs, [["a"]]);
}

#[test]
fn a_cycle_is_found_wherever_it_begins() {
    let arrows = BTreeMap::from([("a", vec!["b"]), ("b", vec!["c", "d"]), ("d", vec!["e"]), ("e", vec!["b"])]);
    assert_eq!(cycle(&arrows), Some(["b", "d", "e", "b"].map(str::to_owned).to_vec()));
    assert_eq!(cycle(&BTreeMap::from([("a", vec!["b", "c"]), ("b", vec!["c"])])), None);
}
