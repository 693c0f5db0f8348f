"""Fakes of NVRTC and of the driver, for machines without them."""

import ctypes
import threading

DRIVER_VERSION = 13000
REFUSED = 801


class FakeNvrtc:
    """Compiles a source to a fake cubin, which says what it was compiled from."""

    def __init__(self, version=(13, 0), log=None, together=1):
        self.version = version
        self.log = log
        self.programs = []
        self.compiled = {}
        self.num_destroyed = 0
        self.barrier = threading.Barrier(together, timeout=20)

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program, source, name, num_headers, headers, names):
        assert (num_headers, headers, names) == (0, None, None)
        self.programs.append(source)
        program._obj.value = len(self.programs)
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.barrier.wait()
        flags = b" ".join(options[i] for i in range(count))
        self.compiled[program.value] = self.programs[program.value - 1] + b" " + flags
        return 6 if self.log else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program, buffer):
        buffer.value = self.log
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(self.compiled[program.value])
        return 0

    def nvrtcGetCUBIN(self, program, buffer):
        buffer.raw = self.compiled[program.value]
        return 0

    def nvrtcDestroyProgram(self, program):
        self.num_destroyed += 1
        return 0


class FakeDriver:
    """Two GPUs with contexts 100 and 101; a function is its module's number and its name."""

    def __init__(self):
        self.stack = []
        self.modules = []
        self.functions = {}
        self.shared = {}
        self.launches = []
        self.maps = []
        self.refused = set()

    def _code(self, name):
        return REFUSED if name in self.refused else 0

    def cuInit(self, flags):
        return self._code("cuInit")

    def cuDriverGetVersion(self, version):
        version._obj.value = DRIVER_VERSION
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"not supported"
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.stack.pop()
        return 0

    def cuModuleLoadData(self, module, cubin):
        self.modules.append((self.stack[-1], cubin))
        module._obj.value = len(self.modules)
        return self._code("cuModuleLoadData")

    def cuModuleGetFunction(self, function, module, name):
        self.functions[1000 + module.value] = (self.stack[-1], name)
        function._obj.value = 1000 + module.value
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        assert attribute == 8  # the attribute for the most bytes of dynamic shared memory
        self.shared[function.value] = value
        return 0

    def cuLaunchKernel(self, function, *given):
        *sizes, stream, places, extra = given
        numbers = [ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] for place in places]
        context, name = self.functions[function.value]
        assert context == self.stack[-1] and extra is None
        self.launches.append((context, name, sizes, stream.value, numbers))
        return self._code("cuLaunchKernel")

    def cuTensorMapEncodeTiled(self, made, dtype, rank, address, sizes, strides, box, steps, *more):
        assert self.stack  # the stack is empty in a new thread, which has no context
        assert ctypes.addressof(made._obj) % 64 == 0
        plain = (dtype, rank, address.value, list(sizes), list(strides), list(box), list(steps))
        self.maps.append((*plain, more))
        return self._code("cuTensorMapEncodeTiled")
