//! What really is in the shared library's ELF file: name, symbol versions, hardening, and nothing that runs by itself.
use atropos_ffi_tests::{build::library, header::PAPER_NAMES};
use object::elf::*;
use object::read::elf::{Dyn, ElfFile64, ProgramHeader, SectionHeader, Sym};
use object::{Endianness, Object, ObjectSection, ObjectSymbol};
use std::fs;

type Elf<'a> = ElfFile64<'a, Endianness>;

fn with_library(check: impl FnOnce(&Elf)) {
    let bytes = fs::read(&library().shared).expect("it was just linked");
    check(&Elf::parse(&*bytes).expect("an ELF file"));
}

/// The dynamic section's entries; names are resolved.
fn dynamic(elf: &Elf) -> Vec<(u64, u64, String)> {
    let (e, data) = (elf.endian(), elf.data());
    let sections = elf.elf_section_table();
    let (entries, strings) = sections.dynamic(e, data).expect("readable").expect("a shared library has one");
    let strings = sections.strings(e, data, strings).expect("it has names");
    let name = |value: u64| strings.get(value as u32).map(|n| String::from_utf8_lossy(n).into()).unwrap_or_default();
    entries.iter().map(|d| (d.d_tag(e), d.d_val(e), name(d.d_val(e)))).collect()
}

fn values(elf: &Elf, tag: u32) -> Vec<u64> {
    dynamic(elf).into_iter().filter(|d| d.0 == tag as u64).map(|d| d.1).collect()
}

fn names(elf: &Elf, tag: u32) -> Vec<String> {
    dynamic(elf).into_iter().filter(|d| d.0 == tag as u64).map(|d| d.2).collect()
}

#[test]
fn it_is_found_by_its_soname_and_needs_only_the_system() {
    with_library(|elf| {
        assert_eq!(names(elf, DT_SONAME), [atropos_link::SONAME]);
        for needed in names(elf, DT_NEEDED) {
            let system = [
                "libc.so.6",
                "libgcc_s.so.1",
                "libm.so.6",
                "libpthread.so.0",
                "libdl.so.2",
                "librt.so.1",
                "libutil.so.1",
            ];
            assert!(system.contains(&&*needed) || needed.starts_with("ld-linux"), "it needs {needed}");
        }
        for (what, tag) in
            [("RPATH", DT_RPATH), ("RUNPATH", DT_RUNPATH), ("TEXTREL", DT_TEXTREL), ("SYMBOLIC", DT_SYMBOLIC)]
        {
            assert!(values(elf, tag).is_empty(), "it has a {what}");
        }
    });
}

/// The table itself, as the dynamic linker reads it: not what a tool says of it.
#[test]
fn every_exported_name_carries_its_version() {
    let map = fs::read_to_string(atropos_link::version_map()).expect("committed");
    let nodes = atropos_link::parse(&map).expect("understood");
    with_library(|elf| {
        let (e, data) = (elf.endian(), elf.data());
        let sections = elf.elf_section_table();
        let versions = sections.versions(e, data).expect("readable").expect("the symbols have versions");
        let symbols = sections.symbols(e, data, SHT_DYNSYM).expect("readable");
        let mut found = Vec::new();
        for (index, symbol) in symbols.enumerate() {
            let name = String::from_utf8_lossy(symbol.name(e, symbols.strings()).expect("named")).into_owned();
            // The versions' own names are absolute symbols.
            if symbol.st_shndx(e) == SHN_UNDEF || symbol.st_shndx(e) == SHN_ABS {
                continue;
            }
            let number = versions.version_index(e, index);
            assert!(!number.is_hidden(), "{name} is a hidden version: programs could not link it");
            let version =
                versions.version(number).expect("readable").unwrap_or_else(|| panic!("{name} has no version"));
            assert!(symbol.st_visibility() == STV_DEFAULT, "{name} is not visible");
            found.push((name, String::from_utf8_lossy(version.name()).into_owned()));
        }
        found.sort();
        let wanted = |node: &atropos_link::Node| {
            node.names.iter().map(|name| (name.clone(), node.version.clone())).collect::<Vec<_>>()
        };
        let mut wanted: Vec<_> = nodes.iter().flat_map(wanted).collect();
        wanted.sort();
        assert_eq!(found, wanted, "left: exported by the library; right: src/capi/libatropos.map");
        let foreign: Vec<_> =
            found.iter().filter(|(n, _)| !n.starts_with("atropos_") && !PAPER_NAMES.contains(&&**n)).collect();
        assert!(foreign.is_empty(), "these would collide with a host's own names: {foreign:?}");
    });
}

#[test]
fn it_is_hardened_and_stays_loaded() {
    with_library(|elf| {
        let flags_1 = values(elf, DT_FLAGS_1).into_iter().fold(0, |all, f| all | f) as u32;
        let flags = values(elf, DT_FLAGS).into_iter().fold(0, |all, f| all | f) as u32;
        assert!(flags_1 & DF_1_NODELETE != 0, "dlclose would unload it under a thread's feet");
        assert!(
            flags_1 & DF_1_NOW != 0 && flags & DF_BIND_NOW != 0,
            "symbols are bound lazily: {flags:#x} {flags_1:#x}"
        );
        assert!(flags & (DF_TEXTREL | DF_SYMBOLIC) == 0, "flags {flags:#x}");
        let e = elf.endian();
        let (mut stack, mut relro) = (false, false);
        for segment in elf.elf_program_headers() {
            let (kind, flags) = (segment.p_type(e), segment.p_flags(e));
            assert!(flags & (PF_W | PF_X) != PF_W | PF_X, "a segment is writable and executable");
            stack |= kind == PT_GNU_STACK && flags & PF_X == 0;
            relro |= kind == PT_GNU_RELRO;
        }
        assert!(stack, "the stack is executable, or the file does not say");
        assert!(relro, "its relocations stay writable");
    });
}

/// Nothing of ours runs at load or unload. The C runtime has an entry in each list (frame_dummy registers exception tables on
/// old systems, __do_global_dtors_aux undoes it), and Rust's standard library one: it notes argc and argv.
#[test]
fn nothing_of_ours_runs_by_itself() {
    with_library(|elf| {
        let e = elf.endian();
        let function = |address: u64| {
            let found = elf.symbols().find(|s| s.address() == address && s.kind() == object::SymbolKind::Text);
            found.and_then(|s| s.name().ok().map(String::from)).unwrap_or_else(|| format!("{address:#x}"))
        };
        let mut seen = Vec::new();
        for section in elf.sections() {
            let kind = section.elf_section_header().sh_type(e);
            let name = section.name().unwrap_or_default().to_owned();
            assert!(!name.starts_with(".ctors") && !name.starts_with(".dtors") && kind != SHT_PREINIT_ARRAY, "{name}");
            if kind != SHT_INIT_ARRAY && kind != SHT_FINI_ARRAY {
                continue;
            }
            let (from, to) = (section.address(), section.address() + section.size());
            let relocations = elf.dynamic_relocations().expect("it is relocatable");
            for (_, relocation) in relocations.filter(|(at, _)| (from..to).contains(at)) {
                seen.push((name.clone(), function(relocation.addend() as u64)));
            }
        }
        // The toolchain's three, and they were all found: no list hides from this test.
        for (list, function) in &seen {
            let c = ["frame_dummy", "__do_global_dtors_aux"].contains(&&**function);
            let std = function.contains("3std") && function.contains("args");
            assert!(c || std, "{function} runs by itself ({list})");
        }
        assert!(seen.iter().any(|(_, f)| f == "frame_dummy") && seen.len() <= 3, "{seen:?}");
        println!("{seen:?}");
    });
}
