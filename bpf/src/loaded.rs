//! Loads the programs into the kernel.

use std::marker::PhantomData;

use aya::{
    Ebpf, EbpfLoader,
    programs::{Program, ProgramError},
};

use crate::error::{Cause, Circumstances, Error};

/// An object whose maps and whose one program, of type `P`, are loaded.
#[derive(Debug)]
pub(crate) struct Loaded<P> {
    /// The program's name.
    pub(crate) name: &'static str,
    /// The maps.
    pub(crate) ebpf: Ebpf,
    kind: PhantomData<P>,
}

impl<P> Loaded<P>
where
    for<'a> &'a P: TryFrom<&'a Program, Error = ProgramError>,
    for<'a> &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    /// Loads the program `name` of `object` by `load`, with these values of its global variables.
    ///
    /// # Errors
    /// The kernel refuses it, mostly for lack of CAP_BPF or CAP_NET_ADMIN.
    pub(crate) fn new(
        name: &'static str,
        object: &[u8],
        globals: &[(&str, &u32)],
        load: fn(&mut P) -> Result<(), ProgramError>,
    ) -> Result<Self, Error> {
        let refused = |cause| Error::Load { program: name, circumstances: Circumstances::now(), cause };
        let mut loader = EbpfLoader::new();
        for (global, value) in globals {
            loader.override_global(global, *value, true);
        }
        let ebpf = loader.load(object).map_err(|error| refused(error.into()))?;
        let mut loaded = Self { name, ebpf, kind: PhantomData };
        loaded.program_mut().and_then(|program| Ok(load(program)?)).map_err(refused)?;
        Ok(loaded)
    }

    /// Returns the program, to attach it.
    ///
    /// # Errors
    /// The object has no such program.
    pub(crate) fn program_mut(&mut self) -> Result<&mut P, Cause> {
        Ok(self.ebpf.program_mut(self.name).ok_or("the object file has no program of this name")?.try_into()?)
    }

    /// Returns the program, for trials.
    pub(crate) fn program(&self) -> Option<&P> {
        self.ebpf.program(self.name)?.try_into().ok()
    }
}
