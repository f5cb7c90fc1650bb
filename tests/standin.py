"""A stand-in for CuPy, with NumPy underneath: arrays that only their own functions may touch.

As CuPy's, they have no `__array_namespace__`, mix with numbers and lists but not with NumPy's
arrays, and leave the device only through `get`, which is counted. Whatever else NumPy tries with
them fails.
"""

import types

import numpy as np

n_transfers = 0


def _refuse(*_, **__):
    raise AssertionError("NumPy was given an array of another library")


def _inside(x):
    """The NumPy array in a stand-in; numbers and lists as they are."""
    if isinstance(x, ndarray):
        return x._array
    if isinstance(x, tuple):
        return tuple(map(_inside, x))
    if isinstance(x, np.ndarray):
        raise TypeError("unsupported type <class 'numpy.ndarray'>")
    return x


class ndarray:  # noqa: N801
    __module__ = "cupy"
    __array__ = __array_ufunc__ = __array_function__ = _refuse

    def __init__(self, array):
        assert isinstance(array, np.ndarray | np.generic)
        self._array = np.asarray(array)

    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: self._array.dtype)
    ndim = property(lambda self: self._array.ndim)
    T = property(lambda self: ndarray(self._array.T))

    def get(self):
        global n_transfers
        n_transfers += 1
        return self._array.copy()

    def __len__(self):
        return len(self._array)

    def __getitem__(self, index):
        return ndarray(self._array[_inside(index)])

    def __setitem__(self, index, value):
        assert isinstance(value, ndarray)
        self._array[_inside(index)] = value._array

    def reshape(self, *shape):
        return ndarray(self._array.reshape(*shape))

    def swapaxes(self, a, b):
        return ndarray(self._array.swapaxes(a, b))

    def copy(self):
        return ndarray(self._array.copy())


def _operator(name):
    def method(self, *others):
        return ndarray(getattr(self._array, name)(*map(_inside, others)))

    return method


def _in_place(name):
    def method(self, other):
        getattr(self._array, name)(_inside(other))
        return self

    return method


for _name in ("add", "sub", "mul", "truediv", "matmul", "and", "or", "pow"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(ndarray, f"__r{_name}__", _operator(f"__r{_name}__"))
    setattr(ndarray, f"__i{_name}__", _in_place(f"__i{_name}__"))
for _name in ("neg", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


def _reduction(name):
    def method(self, axis=None, keepdims=False):
        return ndarray(getattr(self._array, name)(axis=axis, keepdims=keepdims))

    return method


for _name in ("max", "sum", "mean", "argmax"):
    setattr(ndarray, _name, _reduction(_name))


def _function(name):
    def function(*args, **options):
        return ndarray(getattr(np, name)(*map(_inside, args), **options))

    return function


for _name in ("arange", "exp", "log", "maximum", "sqrt", "tanh", "take_along_axis", "where"):
    globals()[_name] = _function(_name)


def asarray(x):
    return x if isinstance(x, ndarray) else ndarray(np.array(x))


def array(x):
    return ndarray(np.array(x._array if isinstance(x, ndarray) else x))


def zeros(shape, dtype=float):
    return ndarray(np.zeros(shape, dtype))


class CUDARuntimeError(RuntimeError):
    pass


cuda = types.SimpleNamespace(
    runtime=types.SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=CUDARuntimeError)
)
