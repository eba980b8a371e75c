//! The pickle of a state dict: names, and for each a tensor as a piece of a storage.
//!
//! A pickle is a program for a stack machine (<https://github.com/python/cpython/blob/v3.13.0/Lib/pickletools.py>). This one
//! knows the opcodes that `torch.save` uses for a dict of tensors, and the globals in [`ALLOWED`]; it calls nothing, it
//! recognizes calls. All else is refused by name. It is bounded in opcodes, stack, memo, tensors, dimensions and lengths, and
//! its values hold no values: a pickle that nests without end is a list. It does not know where storages lie.

use safetensors::Dtype;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most opcodes that are run. A tensor takes about thirty.
const MAX_OPCODES: usize = 1 << 22;
/// Most values on the stack. Python's pickler sets at most 1000 items of a dict at once.
const MAX_STACK: usize = 1 << 14;
/// Most values that are remembered. A tensor takes about seven.
const MAX_MEMO: usize = 1 << 20;
/// Most tensors.
const MAX_TENSORS: usize = 1 << 17;
/// Most bytes of a text.
const MAX_TEXT: usize = 4096;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// The globals that a state dict asks for, as `module.name`.
const ALLOWED: [(&str, Global); 13] = [
    ("collections.OrderedDict", Global::OrderedDict),
    ("torch._utils._rebuild_tensor_v2", Global::RebuildTensor),
    ("torch._utils._rebuild_parameter", Global::RebuildParameter),
    ("torch.DoubleStorage", Global::Storage(Dtype::F64)),
    ("torch.FloatStorage", Global::Storage(Dtype::F32)),
    ("torch.HalfStorage", Global::Storage(Dtype::F16)),
    ("torch.BFloat16Storage", Global::Storage(Dtype::BF16)),
    ("torch.LongStorage", Global::Storage(Dtype::I64)),
    ("torch.IntStorage", Global::Storage(Dtype::I32)),
    ("torch.ShortStorage", Global::Storage(Dtype::I16)),
    ("torch.CharStorage", Global::Storage(Dtype::I8)),
    ("torch.ByteStorage", Global::Storage(Dtype::U8)),
    ("torch.BoolStorage", Global::Storage(Dtype::BOOL)),
];

/// A tensor as the pickle describes it. Nothing of it is checked against the storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PickledTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Key of the storage in the file.
    pub storage: &'a str,
    /// Elements that the storage should have.
    pub storage_len: usize,
    /// First element in the storage.
    pub offset: usize,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Elements from one index of a dimension to the next.
    pub strides: Vec<usize>,
}

/// A function or class that a pickle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

/// A value on the stack. Containers are places in the machine's lists.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value<'a> {
    None,
    Bool,
    Float,
    Int(i64),
    Text(&'a str),
    /// A part of [`Machine::items`].
    Tuple(usize, usize),
    /// An index into [`Machine::dicts`].
    Dict(usize),
    Global(Global),
    /// An index into [`Machine::storages`].
    Storage(usize),
    /// An index into [`Machine::tensors`].
    Tensor(usize),
}

impl Value<'_> {
    /// The kind of value, for messages.
    fn kind(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool => "a bool",
            Self::Float => "a float",
            Self::Int(_) => "an integer",
            Self::Text(_) => "a text",
            Self::Tuple(..) => "a tuple",
            Self::Dict(_) => "a dict",
            Self::Global(_) => "a function or class",
            Self::Storage(_) => "a storage",
            Self::Tensor(_) => "a tensor",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Storage<'a> {
    dtype: Dtype,
    key: &'a str,
    len: usize,
}

/// The machine: its program, its stack and its memory.
#[derive(Debug, Default)]
struct Machine<'a> {
    program: &'a [u8],
    at: usize,
    stack: Vec<Value<'a>>,
    // Heights of the stack, ascending, none above it.
    marks: Vec<usize>,
    memo: BTreeMap<u32, Value<'a>>,
    items: Vec<Value<'a>>,
    dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<PickledTensor<'a>>,
}

/// The tensors of a pickled dict, by name.
///
/// # Errors
/// The defect, or what is refused, by name.
pub(super) fn state_dict(pickle: &[u8]) -> Result<BTreeMap<&str, PickledTensor<'_>>, String> {
    run(pickle)?.finish()
}

/// The one tensor of a pickle.
///
/// # Errors
/// As [`state_dict`].
pub(super) fn tensor(pickle: &[u8]) -> Result<PickledTensor<'_>, String> {
    let mut machine = run(pickle)?;
    match machine.pop()? {
        Value::Tensor(tensor) => Ok(machine.tensors[tensor].clone()),
        other => Err(format!("the pickle holds {}, expected a tensor", other.kind())),
    }
}

/// A machine whose program has ended.
fn run(pickle: &[u8]) -> Result<Machine<'_>, String> {
    let mut machine = Machine { program: pickle, ..Machine::default() };
    for _ in 0..MAX_OPCODES {
        let at = machine.at;
        if machine.step().map_err(|message| format!("{message} (byte {at} of the pickle)"))? == Step::Stop {
            return Ok(machine);
        }
    }
    Err(format!("the pickle has more than {MAX_OPCODES} opcodes"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Next,
    Stop,
}

impl<'a> Machine<'a> {
    /// The tensors of the dict that is left on the stack.
    fn finish(mut self) -> Result<BTreeMap<&'a str, PickledTensor<'a>>, String> {
        let result = self.pop()?;
        let Value::Dict(dict) = result else {
            return Err(format!("the pickle holds {}, expected a dict of tensors", result.kind()));
        };
        let mut named = BTreeMap::new();
        for (key, value) in &self.dicts[dict] {
            let Value::Text(name) = *key else {
                return Err(format!("{} as a name of a tensor, expected a text", key.kind()));
            };
            let Value::Tensor(tensor) = *value else {
                return Err(format!("{name} is {}, expected a tensor: not a plain state dict", value.kind()));
            };
            named.insert(name, self.tensors[tensor].clone());
        }
        Ok(named)
    }

    /// Runs one opcode.
    fn step(&mut self) -> Result<Step, String> {
        let opcode = self.byte()?;
        match opcode {
            b'.' => return Ok(Step::Stop),
            // PROTO, FRAME: their arguments say nothing that is needed.
            0x80 => _ = self.take(1)?,
            0x95 => _ = self.take(8)?,
            b'(' => self.mark()?,
            b'N' => self.push(Value::None)?,
            0x88 | 0x89 => self.push(Value::Bool)?,
            b'J' | b'K' | b'M' | 0x8a => self.integer(opcode)?,
            b'G' => {
                self.take(8)?;
                self.push(Value::Float)?;
            }
            b'X' | b'T' | b'U' | 0x8c => self.text(opcode)?,
            b')' | 0x85 | 0x86 | 0x87 | b't' => self.tuple(opcode)?,
            b'}' => self.dict()?,
            b's' => self.set_items(self.stack.len().checked_sub(2))?,
            b'u' => {
                let mark = self.pop_mark()?;
                self.set_items(Some(mark))?;
            }
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.memo(opcode)?,
            b'c' => self.global()?,
            b'Q' => self.storage()?,
            b'R' => self.call()?,
            b'b' => self.build()?,
            _ => return Err(format!("opcode {opcode:#04x}, which no dict of tensors needs")),
        }
        Ok(Step::Next)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let taken = self.program.get(self.at..).and_then(|rest| rest.get(..n));
        self.at += n;
        taken.ok_or_else(|| "the pickle is cut".to_owned())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let taken = self.take(N)?;
        taken.first_chunk().copied().ok_or_else(|| "the pickle is cut".to_owned())
    }

    fn byte(&mut self) -> Result<u8, String> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), String> {
        if self.stack.len() == MAX_STACK {
            return Err(format!("more than {MAX_STACK} values on the stack"));
        }
        self.stack.push(value);
        Ok(())
    }

    /// Takes a value from the stack, from above the last mark.
    fn pop(&mut self) -> Result<Value<'a>, String> {
        let floor = self.marks.last().copied().unwrap_or_default();
        let value = (self.stack.len() > floor).then(|| self.stack.pop()).flatten();
        value.ok_or_else(|| "a value is missing on the stack".to_owned())
    }

    fn mark(&mut self) -> Result<(), String> {
        if self.marks.len() == MAX_STACK {
            return Err(format!("more than {MAX_STACK} marks"));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn pop_mark(&mut self) -> Result<usize, String> {
        self.marks.pop().ok_or_else(|| "a mark is missing on the stack".to_owned())
    }

    /// `BININT`, `BININT1`, `BININT2`, `LONG1`.
    fn integer(&mut self, opcode: u8) -> Result<(), String> {
        let value = match opcode {
            b'J' => i32::from_le_bytes(self.array()?).into(),
            b'K' => self.byte()?.into(),
            b'M' => u16::from_le_bytes(self.array()?).into(),
            _ => {
                let n = usize::from(self.byte()?);
                let digits = self.take(n)?;
                let sign = if digits.last().is_some_and(|top| top & 0x80 != 0) { 0xff } else { 0 };
                let mut wide = [sign; size_of::<i64>()];
                let place = wide.get_mut(..n).ok_or_else(|| format!("an integer of {n} bytes"))?;
                place.copy_from_slice(digits);
                i64::from_le_bytes(wide)
            }
        };
        self.push(Value::Int(value))
    }

    /// `BINUNICODE`, `BINSTRING`, `SHORT_BINSTRING`, `SHORT_BINUNICODE`.
    fn text(&mut self, opcode: u8) -> Result<(), String> {
        let n = match opcode {
            b'X' | b'T' => u32::from_le_bytes(self.array()?) as usize,
            _ => usize::from(self.byte()?),
        };
        if n > MAX_TEXT {
            return Err(format!("a text of {n} bytes, at most {MAX_TEXT} are read"));
        }
        let text = std::str::from_utf8(self.take(n)?).map_err(|_| "a text is not UTF-8".to_owned())?;
        self.push(Value::Text(text))
    }

    /// `EMPTY_TUPLE`, `TUPLE1`, `TUPLE2`, `TUPLE3`, `TUPLE`.
    fn tuple(&mut self, opcode: u8) -> Result<(), String> {
        let floor = self.marks.last().copied().unwrap_or_default();
        let start = match opcode {
            b')' => Some(self.stack.len()),
            b't' => Some(self.pop_mark()?),
            _ => self.stack.len().checked_sub(usize::from(opcode - 0x84)).filter(|start| *start >= floor),
        };
        let start = start.ok_or("values are missing on the stack")?;
        let first = self.items.len();
        self.items.extend(self.stack.drain(start..));
        self.push(Value::Tuple(first, self.items.len()))
    }

    fn dict(&mut self) -> Result<(), String> {
        self.dicts.push(Vec::new());
        self.push(Value::Dict(self.dicts.len() - 1))
    }

    /// `SETITEM`, `SETITEMS`: pairs from `start` on, into the dict below them.
    fn set_items(&mut self, start: Option<usize>) -> Result<(), String> {
        let floor = self.marks.last().copied().unwrap_or_default();
        let start = start.filter(|start| *start > floor).ok_or("values are missing on the stack")?;
        let Some(Value::Dict(dict)) = self.stack.get(start - 1).copied() else {
            return Err("items of something else than a dict".into());
        };
        let (pairs, rest) = self.stack[start..].as_chunks::<2>();
        if !rest.is_empty() {
            return Err("a key without a value".into());
        }
        self.dicts[dict].extend(pairs.iter().map(|[key, value]| (*key, *value)));
        self.stack.truncate(start);
        Ok(())
    }

    /// `BINPUT`, `LONG_BINPUT`, `MEMOIZE`, `BINGET`, `LONG_BINGET`.
    fn memo(&mut self, opcode: u8) -> Result<(), String> {
        let place = match opcode {
            b'q' | b'h' => self.byte()?.into(),
            b'r' | b'j' => u32::from_le_bytes(self.array()?),
            _ => u32::try_from(self.memo.len()).unwrap_or(u32::MAX),
        };
        if matches!(opcode, b'h' | b'j') {
            let value = self.memo.get(&place).copied();
            return self.push(value.ok_or_else(|| format!("nothing was remembered as {place}"))?);
        }
        if self.memo.len() >= MAX_MEMO {
            return Err(format!("more than {MAX_MEMO} values are remembered"));
        }
        let value = self.stack.last().copied().ok_or("a value is missing on the stack")?;
        self.memo.insert(place, value);
        Ok(())
    }

    /// `GLOBAL`: two lines, module and name.
    fn global(&mut self) -> Result<(), String> {
        let module = self.line()?;
        let name = self.line()?;
        let found = ALLOWED.iter().find(|(allowed, _)| {
            allowed.strip_suffix(name).and_then(|rest| rest.strip_suffix('.')) == Some(module)
        });
        let (_, global) = found.ok_or_else(|| {
            format!("{module}.{name} is none of the functions and classes that a dict of tensors is made of")
        })?;
        self.push(Value::Global(*global))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = self.program.get(self.at..).unwrap_or_default();
        let n = rest.iter().take(MAX_TEXT).position(|byte| *byte == b'\n');
        let n = n.ok_or_else(|| "the name of a function or class is cut or too long".to_owned())?;
        self.at += n + 1;
        std::str::from_utf8(&rest[..n]).map_err(|_| "the name of a function or class is not UTF-8".to_owned())
    }

    /// `BINPERSID`: `('storage', class, key, device, number of elements)`.
    fn storage(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        let storage = match self.elements(id) {
            [
                Value::Text("storage"),
                Value::Global(Global::Storage(dtype)),
                Value::Text(key),
                Value::Text(_),
                Value::Int(n),
            ] => usize::try_from(*n).ok().map(|len| Storage { dtype: *dtype, key, len }),
            _ => None,
        };
        self.storages.push(storage.ok_or("an object outside the pickle that is no storage of torch")?);
        self.push(Value::Storage(self.storages.len() - 1))
    }

    /// `REDUCE`: a call, if it is one of those that make a tensor or an empty dict.
    fn call(&mut self) -> Result<(), String> {
        let arguments = self.pop()?;
        let Value::Global(function) = self.pop()? else {
            return Err("a call of something else than a function or class".into());
        };
        match (function, self.elements(arguments)) {
            (Global::OrderedDict, []) => self.dict(),
            (Global::RebuildParameter, [tensor @ Value::Tensor(_), ..]) => {
                let tensor = *tensor;
                self.push(tensor)
            }
            (
                Global::RebuildTensor,
                [Value::Storage(storage), Value::Int(offset), shape @ Value::Tuple(..), strides, ..],
            ) => {
                let Storage { dtype, key, len } = self.storages[*storage];
                let offset = usize::try_from(*offset).map_err(|_| "an offset below 0".to_owned())?;
                let shape = self.numbers(*shape)?;
                let strides = self.numbers(*strides)?;
                self.tensor(PickledTensor { dtype, storage: key, storage_len: len, offset, shape, strides })
            }
            _ => Err(format!("a call of {function:?} with other arguments than torch's")),
        }
    }

    fn tensor(&mut self, tensor: PickledTensor<'a>) -> Result<(), String> {
        if tensor.shape.len() != tensor.strides.len() {
            return Err("a tensor with other numbers of dimensions and strides".into());
        }
        if self.tensors.len() == MAX_TENSORS {
            return Err(format!("more than {MAX_TENSORS} tensors"));
        }
        self.tensors.push(tensor);
        self.push(Value::Tensor(self.tensors.len() - 1))
    }

    /// `BUILD`: the attributes of a dict (`_metadata`, versions of modules), which are left.
    fn build(&mut self) -> Result<(), String> {
        let state = self.pop()?;
        let floor = self.marks.last().copied().unwrap_or_default();
        let object = self.stack.get(floor..).and_then(<[_]>::last);
        match (object, state) {
            (Some(Value::Dict(_)), Value::Dict(_)) => Ok(()),
            _ => Err("the state of something else than a dict".into()),
        }
    }

    /// The values of a tuple; of anything else none.
    fn elements(&self, value: Value<'a>) -> &[Value<'a>] {
        match value {
            Value::Tuple(start, end) => &self.items[Range { start, end }],
            _ => &[],
        }
    }

    /// A tuple of dimensions or strides.
    fn numbers(&self, value: Value<'a>) -> Result<Vec<usize>, String> {
        let values = self.elements(value);
        if values.len() > MAX_DIMENSIONS {
            return Err(format!(
                "a tensor of {} dimensions, at most {MAX_DIMENSIONS} are read",
                values.len()
            ));
        }
        let number = |value: &Value<'_>| match value {
            Value::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        };
        let numbers: Option<Vec<usize>> = values.iter().map(number).collect();
        numbers.ok_or_else(|| "a dimension or stride that is no integer from 0".to_owned())
    }
}
